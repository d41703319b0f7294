// The submodule `launch_facts` of the module _nvfp4_cpu.
#pragma once

#include <nanobind/nanobind.h>

namespace nvfp4 {

// Defines all facts in `m`.
void DefineLaunchFacts(nanobind::module_ m);

}  // namespace nvfp4
