# The CPU module. Each cpu/gemm_*.cc selects its instruction set by a pragma, and cpu/isa.cc chooses
# one of them at run time, so that no -march option is needed.
file(GLOB nvfp4_cpu_sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/cpu/*.cc")
add_library(nvfp4_cpu_kernels STATIC ${nvfp4_cpu_sources})
set_target_properties(nvfp4_cpu_kernels PROPERTIES CXX_VISIBILITY_PRESET hidden)
nanobind_add_module(_nvfp4_cpu NB_STATIC STABLE_ABI cpu_bindings.cc launch_facts.cc)
foreach(target _nvfp4_cpu nvfp4_cpu_kernels)
  target_include_directories(${target} PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")
  target_include_directories(${target} SYSTEM PRIVATE "${xla_include}")
  target_compile_options(${target} PRIVATE -O3 -Wall -Wextra)
endforeach()
# nanobind gives the module the same options.
target_compile_options(nvfp4_cpu_kernels PRIVATE
  -fno-stack-protector -ffunction-sections -fdata-sections)
# The module that is always there says why another one is not.
set_source_files_properties(cpu_bindings.cc PROPERTIES COMPILE_DEFINITIONS
  "NVFP4_CUDA_WHY=\"${NVFP4_CUDA_WHY}\"")
if(NVFP4_SANITIZE)
  foreach(target _nvfp4_cpu nvfp4_cpu_kernels)
    target_compile_options(${target} PRIVATE -fsanitize=address,undefined -fno-omit-frame-pointer)
  endforeach()
  target_link_options(_nvfp4_cpu PRIVATE -fsanitize=address,undefined)
endif()
nvfp4_link_kernels(_nvfp4_cpu CXX nvfp4_cpu_kernels)
install(TARGETS _nvfp4_cpu LIBRARY DESTINATION jax_nvfp4_moe)
