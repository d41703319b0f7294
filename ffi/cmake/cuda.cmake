# The CUDA module, which is built if NVFP4_CUDA is ON. The build backend (nvfp4_build.py) sets that
# option, the compiler and the architectures. find_package(CUDAToolkit) is not used, because it does
# not know the layout of PyPI's wheels of nvcc.

# Returns the folder of the CUTLASS headers; it is empty if there are none. The Python package is
# not imported, because that would run its kernel generator.
function(nvfp4_find_cutlass include_out)
  set(include "${NVFP4_CUTLASS_INCLUDE}")
  if(include STREQUAL "")
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c
              "import importlib.util as u; s = u.find_spec('cutlass_library'); print(s.submodule_search_locations[0] + '/source/include' if s else '')"
      OUTPUT_VARIABLE include OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  elseif(NOT EXISTS "${include}/cutlass/cutlass.h")
    message(FATAL_ERROR "NVFP4_CUTLASS_INCLUDE: expected cutlass/cutlass.h in ${include}")
  endif()
  set(${include_out} "${include}" PARENT_SCOPE)
endfunction()

if(NOT NVFP4_CUDA)
  message(STATUS "CUDA kernels: not built: ${NVFP4_CUDA_WHY}")
  return()
endif()
message(STATUS "CUDA kernels: ${CMAKE_CUDA_COMPILER}, ${NVFP4_CUDA_ARCHITECTURES}: ${NVFP4_CUDA_WHY}")

set(CMAKE_CUDA_ARCHITECTURES "${NVFP4_CUDA_ARCHITECTURES}")
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
# The profile of nvcc names lib64, but the wheels have lib.
file(REAL_PATH "${CMAKE_CUDA_COMPILER}" nvfp4_cuda_root)
cmake_path(GET nvfp4_cuda_root PARENT_PATH nvfp4_cuda_root)
cmake_path(GET nvfp4_cuda_root PARENT_PATH nvfp4_cuda_root)
if(IS_DIRECTORY "${nvfp4_cuda_root}/lib" AND NOT IS_DIRECTORY "${nvfp4_cuda_root}/lib64")
  string(APPEND CMAKE_CUDA_FLAGS " -L${nvfp4_cuda_root}/lib")
  link_directories("${nvfp4_cuda_root}/lib")
endif()
enable_language(CUDA)

file(GLOB_RECURSE nvfp4_cuda_sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/cuda/*.cu")
# Files are compiled in this order. Those that take minutes come first, so that none is left alone.
set(nvfp4_long_sources expert_gemm_sm80 expert_gemm_few dense_vector)
list(TRANSFORM nvfp4_long_sources PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/cuda/gemm/")
list(TRANSFORM nvfp4_long_sources APPEND ".cu")
list(REMOVE_ITEM nvfp4_cuda_sources ${nvfp4_long_sources})
list(PREPEND nvfp4_cuda_sources ${nvfp4_long_sources})
set(nvfp4_sm90_sources ${nvfp4_cuda_sources})
list(FILTER nvfp4_sm90_sources INCLUDE REGEX "_sm90\\.cu$")
set(nvfp4_sm120_sources ${nvfp4_cuda_sources})
list(FILTER nvfp4_sm120_sources INCLUDE REGEX "_sm120\\.cu$")
list(FILTER nvfp4_cuda_sources EXCLUDE REGEX "_sm(90|120)\\.cu$")
list(FILTER nvfp4_cuda_sources EXCLUDE REGEX "fp4_gemm_sm100\\.cu$")
# The collectives of CUTLASS, for 10.x only. Compiling them takes 7 GiB of memory, and longer than any
# other file. They come first, so that other files are compiled beside them.
nvfp4_find_cutlass(nvfp4_cutlass)
if(nvfp4_cutlass)
  message(STATUS "CUTLASS: ${nvfp4_cutlass}")
  add_library(nvfp4_sm100_kernels STATIC cuda/gemm/fp4_gemm_sm100.cu)
  set_target_properties(nvfp4_sm100_kernels PROPERTIES CUDA_ARCHITECTURES 100f-real)
  target_include_directories(nvfp4_sm100_kernels SYSTEM PRIVATE "${nvfp4_cutlass}")
  target_compile_options(nvfp4_sm100_kernels PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
else()
  message(STATUS "CUTLASS: not found, so the kernels of moe_w4a4_sm100 are not built (to build them, install nvidia-cutlass 4.2.0.0 from PyPI)")
endif()
add_library(nvfp4_cuda_kernels STATIC ${nvfp4_cuda_sources})
# These kernels use instructions that only sm_90a has.
add_library(nvfp4_sm90_kernels STATIC ${nvfp4_sm90_sources})
set_target_properties(nvfp4_sm90_kernels PROPERTIES CUDA_ARCHITECTURES 90a-real)
# These kernels use one instruction that only 12.x has. An emulation of it lets a Hopper GPU run the
# same kernels. That is slow, and meant for tests.
add_library(nvfp4_sm120_kernels STATIC ${nvfp4_sm120_sources})
if(NVFP4_EMULATE_BLACKWELL)
  set_target_properties(nvfp4_sm120_kernels PROPERTIES CUDA_ARCHITECTURES "90a-real;120f-real")
else()
  set_target_properties(nvfp4_sm120_kernels PROPERTIES CUDA_ARCHITECTURES 120f-real)
endif()
set(nvfp4_libraries nvfp4_cuda_kernels nvfp4_sm90_kernels nvfp4_sm120_kernels)
if(nvfp4_cutlass)
  list(APPEND nvfp4_libraries nvfp4_sm100_kernels)
endif()

foreach(library ${nvfp4_libraries})
  target_include_directories(${library} PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")
  set_target_properties(${library} PROPERTIES CUDA_VISIBILITY_PRESET hidden)
  # Do not add --use_fast_math: the quantizer is exact only with IEEE division and subnormals.
  target_compile_options(${library} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:-O3 -prec-div=true -ftz=false -Xcompiler=-Wall,-Wextra
                               --compress-mode=size>)
endforeach()

nanobind_add_module(_nvfp4_cuda NB_STATIC STABLE_ABI
  cuda_module.cc cuda_bindings.cc cuda_attention_bindings.cc cuda_forks.cc cuda_mixer_bindings.cc
  cuda_peer_bindings.cc cuda_peers.cc cuda_recurrent_bindings.cc)
target_include_directories(_nvfp4_cuda PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")
target_include_directories(_nvfp4_cuda SYSTEM PRIVATE
  "${xla_include}" ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_compile_options(_nvfp4_cuda PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra>)
string(REPLACE ";" " " nvfp4_listed "${NVFP4_CUDA_ARCHITECTURES}")
set_source_files_properties(cuda_module.cc PROPERTIES COMPILE_DEFINITIONS
  "NVFP4_ARCHITECTURES=\"${nvfp4_listed}\";NVFP4_NVCC=\"${CMAKE_CUDA_COMPILER_VERSION}\"")
foreach(target _nvfp4_cuda nvfp4_cuda_kernels)
  target_compile_definitions(${target} PRIVATE
    NVFP4_EMULATE_BLACKWELL=$<BOOL:${NVFP4_EMULATE_BLACKWELL}>
    NVFP4_CUTLASS=$<BOOL:${nvfp4_cutlass}>)
endforeach()
nvfp4_link_kernels(_nvfp4_cuda CUDA ${nvfp4_libraries})
install(TARGETS _nvfp4_cuda LIBRARY DESTINATION jax_nvfp4_moe)
