"""The parts of the Triton backend: a module for each module of formats, and what they share.

Importing one needs Triton, so only the printed kernels do. A function takes and returns blocks of
one tile: FP32 values, and planes as they are stored; 16-bit floats travel as their int16 patterns.
Nothing is cast between FP32 and BF16: the interpreter truncates, so rounding is integer arithmetic.
"""
