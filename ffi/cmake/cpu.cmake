# The CPU module. Each cpu/gemm_*.cc selects its instruction set by a pragma, and cpu/isa.cc chooses
# one of them at run time, so that no -march option is needed.
file(GLOB nvfp4_cpu_sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/cpu/*.cc")
nanobind_add_module(_nvfp4_cpu NB_STATIC STABLE_ABI
  cpu_bindings.cc launch_facts.cc ${nvfp4_cpu_sources})
target_include_directories(_nvfp4_cpu PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")
target_include_directories(_nvfp4_cpu SYSTEM PRIVATE "${xla_include}")
target_compile_options(_nvfp4_cpu PRIVATE -O3 -Wall -Wextra)
# The module that is always there says why another one is not.
set_source_files_properties(cpu_bindings.cc PROPERTIES COMPILE_DEFINITIONS
  "NVFP4_CUDA_WHY=\"${NVFP4_CUDA_WHY}\"")
if(NVFP4_SANITIZE)
  target_compile_options(_nvfp4_cpu PRIVATE -fsanitize=address,undefined -fno-omit-frame-pointer)
  target_link_options(_nvfp4_cpu PRIVATE -fsanitize=address,undefined)
endif()
install(TARGETS _nvfp4_cpu LIBRARY DESTINATION jax_nvfp4_moe)
