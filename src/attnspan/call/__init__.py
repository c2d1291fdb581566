"""One call of attention, checked once for every front end, with its options, biases and dropout."""

from .call import LAYOUTS as LAYOUTS
from .call import MAX_LENGTH as MAX_LENGTH
from .call import Call as Call
from .call import Front as Front
from .call import Part as Part
from .call import Problem as Problem
from .call import check_k_len as check_k_len
from .call import check_keywords as check_keywords
from .call import check_layout as check_layout
from .call import forwards_to as forwards_to
from .call import lower_mask as lower_mask
