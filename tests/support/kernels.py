"""Which tests need the kernels."""

from importlib.util import find_spec

import pytest

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="the kernels need triton")
