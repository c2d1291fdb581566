"""Functions of `Plan.on`, `LocalPlan.on`, `Layout.gather` and `roll` on torch's meshes."""

from .mesh_plan import MeshPlan, for_roll, on_mesh
from .rows import gather_rows

STEPS = {"plan": on_mesh, "local plan": MeshPlan.of, "rows": gather_rows, "roll": for_roll}
