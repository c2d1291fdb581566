"""On PYTHONPATH, this gives a Python process the compiled module that ATTNSPAN_CORE names, or ends it."""

import os
import sys
import traceback
from importlib.util import module_from_spec, spec_from_file_location

try:
    spec = spec_from_file_location("attnspan._core", os.environ["ATTNSPAN_CORE"])
    assert spec is not None
    assert spec.loader is not None
    core = module_from_spec(spec)
    sys.modules[spec.name] = core
    spec.loader.exec_module(core)
except Exception:
    # Python would go on without what this file was to do: with the module that is installed.
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)
