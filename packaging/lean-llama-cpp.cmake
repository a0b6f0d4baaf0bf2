# Shorten llama-cpp-python's build. llama.cpp's CMakeLists.txt reads this file through CMAKE_PROJECT_llama_cpp_INCLUDE. Each
# variable is set before the option with the same name is declared.

include("${CMAKE_CURRENT_LIST_DIR}/../localllm/setup/compiler_faults.cmake")

# llama.cpp's library for command-line tools is a quarter of the build and is never loaded.
set(LLAMA_BUILD_COMMON OFF)

# Code that runs once per model or picture is compiled with -O1, in two thirds of the time: graph construction, loading,
# quantizing, and image preprocessing. Code that runs for each token keeps -O3, like all of ggml.
function(localllm_cold_code)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang")
    return()
  endif()
  if(TARGET mtmd)
    target_compile_options(mtmd PRIVATE -O1)
  endif()
  if(TARGET llama)
    target_compile_options(llama PRIVATE -O1)
    get_target_property(sources llama SOURCES)
    list(FILTER sources INCLUDE REGEX "(^|/)(llama-(batch|context|graph|kv-cache.*|kv-cells|memory.*|vocab)|unicode)\\.cpp$")
    get_target_property(folder llama SOURCE_DIR)
    list(TRANSFORM sources PREPEND "${folder}/")
    set_property(SOURCE ${sources} DIRECTORY "${folder}" APPEND PROPERTY COMPILE_OPTIONS -O3)
  endif()
endfunction()
cmake_language(DEFER DIRECTORY "${CMAKE_SOURCE_DIR}" CALL localllm_cold_code)
