// Compares ffi/cuda/gemm/fp4_groups.cuh and nvfp4.h with CUTLASS's own types: the numbers that
// describe a layout of scales, the offset of the scale of each row and block, and the strides of
// operands.
//
// Prints how many values were compared and how many differ. With an argument, rows are off by one,
// so that values must differ.
#include <cstdio>
#include <cstring>

#include "cuda/gemm/fp4_groups.cuh"
#include "cute/tensor.hpp"
#include "cutlass/detail/sm100_blockscaled_layout.hpp"

namespace {

using Config = cutlass::detail::Sm1xxBlockScaledConfig<16>;

long compared, different;

void Compare(bool equal) {
  ++compared;
  different += !equal;
}

template <typename Layout>
void CompareLayout(const Layout& cutes, int rows, int k, int error) {
  const Config::LayoutSF stored = cutes;
  const nvfp4::ScaleLayout ours = nvfp4::MakeScaleLayout(rows + error, k);
  static_assert(sizeof(stored) == sizeof(ours));
  Compare(std::memcmp(&stored, &ours, sizeof(ours)) == 0);
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < k; ++column) {
      const int64_t offset = nvfp4::Swizzle128x4(row + error, column / 16, 4 * ours.k_tiles);
      Compare(offset == static_cast<int64_t>(cutes(row, column, 0)));
    }
  }
}

template <typename Stride>
void CompareStride(const Stride& stride, int64_t ours) {
  static_assert(sizeof(stride) == sizeof(ours));
  Compare(std::memcmp(&stride, &ours, sizeof(ours)) == 0);
}

}  // namespace

int main(int count, char**) {
  const int error = count > 1 ? 1 : 0;
  for (const int rows : {1, 31, 128, 129, 200, 513}) {
    for (const int k : {64, 128, 320, 1088}) {
      const auto shape = cute::make_shape(rows, rows, k, 1);
      CompareLayout(Config::tile_atom_to_shape_SFA(shape), rows, k, error);
      CompareLayout(Config::tile_atom_to_shape_SFB(shape), rows, k, error);
      CompareStride(cute::Stride<int64_t, cute::_1, cute::_0>{k, {}, {}}, k + error);
      CompareStride(cute::Stride<cute::_1, int64_t, cute::_0>{{}, rows, {}}, rows + error);
    }
  }
  const cute::Shape<int, int, int> shape{3, 5, 7};
  const nvfp4::GroupShape ours = {3 + error, 5, 7};
  static_assert(sizeof(shape) == sizeof(ours));
  Compare(std::memcmp(&shape, &ours, sizeof(ours)) == 0);
  std::printf("%ld %ld\n", compared, different);
}
