"""The backends of JAX: their registration, the choice for each platform, and their run in any layout."""

from .choice import Branch as Branch
from .choice import Chosen as Chosen
from .choice import choice_of as choice_of
from .choice import choose_backend as choose_backend
from .choice import chosen_for as chosen_for
from .choice import warn_if_slow as warn_if_slow
from .run import backward as backward
from .run import forward as forward
