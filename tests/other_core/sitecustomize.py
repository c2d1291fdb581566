"""With this folder on PYTHONPATH, every Python process has the compiled module that ATTNSPAN_CORE names."""

import os
import sys
from importlib.util import module_from_spec, spec_from_file_location

spec = spec_from_file_location("attnspan._core", os.environ["ATTNSPAN_CORE"])
assert spec is not None
assert spec.loader is not None
core = module_from_spec(spec)
sys.modules[spec.name] = core
spec.loader.exec_module(core)
