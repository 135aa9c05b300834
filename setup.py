"""What pyproject.toml cannot say in a stable form: kernels of our own, built where there is a C compiler."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "p2p_co2.tensors.codec._native",
            ["p2p_co2/tensors/codec/passes.c"],
            extra_compile_args=["-O3", "-std=c11", "-ffp-contract=off"],
            optional=True,  # without it torch's operations serve, slower; passes.py
            py_limited_api=True,
        )
    ],
    # Loaded by ctypes, it knows nothing of Python: one wheel serves 3.11 and all that come after it.
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
