// AVX2 + F16C kernels: eight elements at a time.
#include "adamw_kernel.hpp"

#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>

namespace lohan {
namespace {

struct Avx2 {
  static constexpr size_t width = 8;
  using F = __m256;
  static F set(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F sqrt(F a) { return _mm256_sqrt_ps(a); }

  static __m128i load16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static void store16(void* p, __m256i low_halves) {
    __m256i packed = _mm256_packus_epi32(low_halves, low_halves);
    packed = _mm256_permute4x64_epi64(packed, 0x08);
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
  }
  static __m256i widen_bf16(const uint16_t* p) {
    return _mm256_slli_epi32(_mm256_cvtepu16_epi32(load16(p)), 16);
  }
  static F load_bf16(const uint16_t* p) { return _mm256_castsi256_ps(widen_bf16(p)); }
  static F load_fp16(const uint16_t* p) { return _mm256_cvtph_ps(load16(p)); }
  static void store_fp16(uint16_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  static F join(const uint16_t* w, const int16_t* r) {
    return _mm256_castsi256_ps(
        _mm256_add_epi32(widen_bf16(w), _mm256_cvtepi16_epi32(load16(r))));
  }
  static void split(uint16_t* w, int16_t* r, F x) {
    F nan = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(kQuietNan)));
    x = _mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    __m256i u = _mm256_castps_si256(x);
    store16(w, _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x8000)), 16));
    store16(r, _mm256_and_si256(u, _mm256_set1_epi32(0xffff)));
  }
};

}  // namespace
extern const Kernels kernels_avx2 = kernels_of<Avx2>();
}  // namespace lohan
#else
namespace lohan {
extern const Kernels kernels_avx2 = {};
}  // namespace lohan
#endif
