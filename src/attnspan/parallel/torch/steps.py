"""Functions of `Plan.on`, `LocalPlan.on` and `Layout.gather` on torch's meshes."""

from .mesh_plan import MeshPlan, on_mesh
from .rows import gather_rows

STEPS = {"plan": on_mesh, "local plan": MeshPlan.of, "rows": gather_rows}
