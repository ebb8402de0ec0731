from tensortap.rooms.doctor.jax import JaxContract
from tests.values.contract import FrameworkContract


class TestJax(JaxContract, FrameworkContract):
    pass
