from tensortap.values.jax.contract import JaxContract
from tests.values.contract import FrameworkContract


class TestJax(JaxContract, FrameworkContract):
    pass
