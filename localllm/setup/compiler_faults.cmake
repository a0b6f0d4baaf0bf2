# Works around faults of compilers in builds of llama.cpp. Read by its CMakeLists.txt, or llama-cpp-python's, through
# CMAKE_PROJECT_…_INCLUDE.

# GCC before 11.5, 12.4 and 13.3 drops the stores of most of AMX's tile configuration (GCC's bug 114098, llama.cpp's pull
# request 26954). The first large matrix product then ends the process with SIGILL. Without AMX, AVX-512 is used.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  string(REGEX MATCH "^[0-9]+" localllm_gcc "${CMAKE_CXX_COMPILER_VERSION}")
  set(localllm_first_right 0)
  if(localllm_gcc EQUAL 11)
    set(localllm_first_right 11.5)
  elseif(localllm_gcc EQUAL 12)
    set(localllm_first_right 12.4)
  elseif(localllm_gcc EQUAL 13)
    set(localllm_first_right 13.3)
  endif()
  if(CMAKE_CXX_COMPILER_VERSION VERSION_LESS localllm_first_right)
    message(STATUS "GCC ${CMAKE_CXX_COMPILER_VERSION} compiles AMX wrongly: building without AMX (GCC ${localllm_first_right} can)")
    add_compile_options(-mno-amx-tile -mno-amx-int8 -mno-amx-bf16)
  endif()
endif()
