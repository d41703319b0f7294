# The kernels of both modules are static libraries.

set(NVFP4_KERNELS "" CACHE PATH
    "Build folder with the same options, whose kernels are linked instead of compiled again; for release wheels")

# Links a module with its libraries of kernels, which are of a language. The kernels do not depend on
# Python, so that the module for a second Python links those of the first.
function(nvfp4_link_kernels module language)
  set(libraries ${ARGN})
  if(NVFP4_KERNELS)
    set_target_properties(${libraries} PROPERTIES EXCLUDE_FROM_ALL ON)
    foreach(library ${libraries})
      add_library(${library}_built STATIC IMPORTED)
      set_target_properties(${library}_built PROPERTIES
        IMPORTED_LOCATION "${NVFP4_KERNELS}/lib${library}.a"
        IMPORTED_LINK_INTERFACE_LANGUAGES "${language}")
    endforeach()
    list(TRANSFORM libraries APPEND "_built")
  endif()
  target_link_libraries(${module} PRIVATE ${libraries})
endfunction()
