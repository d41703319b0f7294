// Checks the operands of `prepare_heads`, and the scales of a cache in E4M3. The handlers for CPUs
// and GPUs share these checks.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "checks.h"
#include "shapes.h"
#include "xla/ffi/api/ffi.h"

namespace nvfp4 {

struct HeadsOperands {
  ffi::AnyBuffer qkv, positions, keys, values, q_weight, k_weight, frequencies;
  ffi::AnyBuffer q, new_keys, new_values;  // results
};

// `cache_type` is that of the qkv, or E4M3.
inline ffi::Error CheckHeadsTypes(const HeadsOperands& o, ffi::DataType cache_type, DataType* type,
                                  DataType* weight_type) {
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("qkv", o.qkv.element_type(), type));
  if (*type == DataType::kF32) return Expected("qkv", "bfloat16 or float16", "float32");
  NVFP4_RETURN_IF_ERROR(ExpectActivationType("q_weight", o.q_weight.element_type(), weight_type));
  if (*weight_type != *type && *weight_type != DataType::kF32) {
    return Expected("q_weight", "float32 or the type of qkv", TypeText(o.q_weight.element_type()));
  }
  NVFP4_RETURN_IF_ERROR(
      ExpectType("k_weight", o.k_weight.element_type(), o.q_weight.element_type()));
  NVFP4_RETURN_IF_ERROR(ExpectType("positions", o.positions.element_type(), ffi::S32));
  NVFP4_RETURN_IF_ERROR(ExpectType("frequencies", o.frequencies.element_type(), ffi::F32));
  for (const NamedOperand& operand :
       {NamedOperand{"keys", o.keys}, NamedOperand{"values", o.values},
        NamedOperand{"new_keys", o.new_keys}, NamedOperand{"new_values", o.new_values}}) {
    NVFP4_RETURN_IF_ERROR(ExpectType(operand.name, operand.buffer.element_type(), cache_type));
  }
  return ExpectType("q", o.q.element_type(), o.qkv.element_type());
}

// Reads the sizes and types of the operands, which start at multiples of `alignment` bytes.
inline ffi::Error CheckHeads(const HeadsOperands& o, bool gated, ffi::DataType cache_type,
                             size_t alignment, HeadsShape* shape, DataType* type,
                             DataType* weight_type) {
  NVFP4_RETURN_IF_ERROR(CheckHeadsTypes(o, cache_type, type, weight_type));
  NVFP4_RETURN_IF_ERROR(ExpectRank("keys [b, m, s, d]", o.keys.dimensions(), 4));
  NVFP4_RETURN_IF_ERROR(ExpectRank("q [b, t, n, d]", o.q.dimensions(), 4));
  NVFP4_RETURN_IF_ERROR(ExpectRank("frequencies [r/2]", o.frequencies.dimensions(), 1));
  const int64_t b = o.keys.dimensions()[0], m = o.keys.dimensions()[1], s = o.keys.dimensions()[2];
  const int64_t d = o.keys.dimensions()[3], t = o.q.dimensions()[1], n = o.q.dimensions()[2];
  const int64_t half = o.frequencies.dimensions()[0];
  *shape = {b, t, s, n, m, d, half};
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("d (keys)", d, kMaxPreparedWidth));
  NVFP4_RETURN_IF_ERROR(ExpectAtMost("r (frequencies)", 2 * half, d));
  NVFP4_RETURN_IF_ERROR(ExpectDims("q [b, t, n, d]", o.q.dimensions(), {b, t, n, d}));
  const int64_t queries = gated ? 2 * n : n;  // with the gates beside them
  NVFP4_RETURN_IF_ERROR(ExpectDims(gated ? "qkv [b, t, (2n + 2m) d]" : "qkv [b, t, (n + 2m) d]",
                                   o.qkv.dimensions(), {b, t, (queries + 2 * m) * d}));
  NVFP4_RETURN_IF_ERROR(ExpectDims("positions [b, t]", o.positions.dimensions(), {b, t}));
  for (const NamedOperand& operand :
       {NamedOperand{"values", o.values}, NamedOperand{"new_keys", o.new_keys},
        NamedOperand{"new_values", o.new_values}}) {
    NVFP4_RETURN_IF_ERROR(ExpectDims(operand.name, operand.buffer.dimensions(), {b, m, s, d}));
  }
  NVFP4_RETURN_IF_ERROR(ExpectDimsOrEmpty("q_weight [d]", o.q_weight.dimensions(), {d}));
  NVFP4_RETURN_IF_ERROR(
      ExpectDims("k_weight [d]", o.k_weight.dimensions(), {o.q_weight.dimensions()[0]}));
  return ExpectAligned({{"qkv", o.qkv},
                        {"positions", o.positions},
                        {"keys", o.keys},
                        {"values", o.values},
                        {"q", o.q}},
                       alignment);
}

// Checks the scales of keys and values in E4M3, one for each of m heads.
inline ffi::Error CheckHeadScales(ffi::AnyBuffer k_scale, ffi::AnyBuffer v_scale, int64_t m,
                                  size_t alignment) {
  for (const NamedOperand& operand :
       {NamedOperand{"k_scale [m]", k_scale}, NamedOperand{"v_scale [m]", v_scale}}) {
    NVFP4_RETURN_IF_ERROR(ExpectType(operand.name, operand.buffer.element_type(), ffi::F32));
    NVFP4_RETURN_IF_ERROR(ExpectDims(operand.name, operand.buffer.dimensions(), {m}));
  }
  return ExpectAligned({{"k_scale", k_scale}, {"v_scale", v_scale}}, alignment);
}

}  // namespace nvfp4
