// Prints CuTe's maps of the block-scaled FP4 MMA m16n8k64, for test_fp4_fragments.py. Each operand
// is a line of offsets. That of value v in lane l is at l * values + v.
//
// Offsets are m + 16 k for A and its scales, n + 8 k for B and its scales, and m + 16 n for the
// sums.
#include <cstdio>
#include <cute/atom/mma_traits_sm120.hpp>

using Operation =
    cute::SM120::BLOCKSCALED::SM120_16x8x64_TN_VS<cutlass::float_e2m1_t, cutlass::float_e2m1_t,
                                                  float, cutlass::float_ue4m3_t, 16>;
using Traits = cute::MMA_Traits<Operation>;

template <typename Layout>
void Print(const char* name, const Layout& layout) {
  std::printf("%s", name);
  for (int lane = 0; lane < cute::size<0>(layout); ++lane) {
    for (int value = 0; value < cute::size<1>(layout); ++value) {
      std::printf(" %d", static_cast<int>(layout(lane, value)));
    }
  }
  std::printf("\n");
}

int main() {
  Print("a", Traits::ALayout{});
  Print("b", Traits::BLayout{});
  Print("sums", Traits::CLayout{});
  Print("scale_a", Traits::SFALayout{});
  Print("scale_b", Traits::SFBLayout{});
}
