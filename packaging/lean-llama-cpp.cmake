# Makes llama-cpp-python's build shorter. Read by llama.cpp's CMakeLists.txt through CMAKE_PROJECT_llama_cpp_INCLUDE; a
# variable stands before the option it sets.

include("${CMAKE_CURRENT_LIST_DIR}/../localllm/setup/compiler_faults.cmake")

# Its library for command-line tools, a quarter of the build, is never loaded.
set(LLAMA_BUILD_COMMON OFF)

# What runs once for a model or a picture is compiled with -O1, in two thirds of the time: how each architecture's graph is
# laid out, loading, quantizing, and what prepares pictures. What runs for each token keeps -O3, as all of ggml does.
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
