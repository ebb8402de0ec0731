# Included by the project llama.cpp: see `make engines`.
set(LLAMA_BUILD_COMMON OFF)
