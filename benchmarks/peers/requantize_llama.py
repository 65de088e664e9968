"""Write a GGUF in Q8_0: requantize_llama.py IN OUT. Runs in the environment of `install llama`."""

import sys

import llama_cpp as lc

params = lc.llama_model_quantize_default_params()
params.ftype = lc.LLAMA_FTYPE_MOSTLY_Q8_0
params.allow_requantize = True
sys.exit(lc.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), params))
