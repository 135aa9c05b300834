"""What pyproject.toml cannot say in a stable form: the codecs' kernel, built where there is a C compiler."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "p2p_co2.codec._native",
            ["p2p_co2/codec/native.c"],
            extra_compile_args=["-O3", "-std=c11"],
            optional=True,  # without it torch's operations decode, slower; p2p_co2/codec/native.py
        )
    ]
)
