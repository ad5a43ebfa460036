import os

# Some virtual machines name AMX among the processor's features but do not let it run: a product of half-precision matrices
# then ends the process ("Illegal instruction"). oneDNN reads this once, before its first product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
