# Keeps llama-cpp-python from compiling what it never loads: llama.cpp's library for its command-line tools, a quarter of the
# build. Read by its CMakeLists.txt through CMAKE_PROJECT_llama_cpp_INCLUDE; a variable stands before the option it sets.
set(LLAMA_BUILD_COMMON OFF)
