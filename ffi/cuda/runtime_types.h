// cudaStream_t and cudaError_t, for declarations. Python's facts come from launch.h too
// (launch_facts.cc), which is compiled without CUDA's headers and calls no launch.
#pragma once

#if __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>
#else
struct CUstream_st;
using cudaStream_t = CUstream_st*;
enum cudaError_t : int {};
#endif
