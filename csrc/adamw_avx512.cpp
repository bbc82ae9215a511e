// AVX-512 kernels: sixteen elements at a time.
#include "adamw_kernel.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>

namespace lohan {
namespace {

struct Avx512 {
  static constexpr size_t width = 16;
  using F = __m512;
  static F set(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F sqrt(F a) { return _mm512_sqrt_ps(a); }

  static __m256i load16(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
  }
  static void store16(void* p, __m512i low_halves) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(low_halves));
  }
  static __m512i widen_bf16(const uint16_t* p) {
    return _mm512_slli_epi32(_mm512_cvtepu16_epi32(load16(p)), 16);
  }
  static F load_bf16(const uint16_t* p) { return _mm512_castsi512_ps(widen_bf16(p)); }
  static F load_fp16(const uint16_t* p) { return _mm512_cvtph_ps(load16(p)); }
  static void store_fp16(uint16_t* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  static F join(const uint16_t* w, const int16_t* r) {
    return _mm512_castsi512_ps(
        _mm512_add_epi32(widen_bf16(w), _mm512_cvtepi16_epi32(load16(r))));
  }
  static void split(uint16_t* w, int16_t* r, F x) {
    __m512i u = _mm512_mask_set1_epi32(_mm512_castps_si512(x),
                                       _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q),
                                       static_cast<int>(kQuietNan));
    store16(w, _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x8000)), 16));
    store16(r, u);
  }
};

}  // namespace
extern const Kernels kernels_avx512 = kernels_of<Avx512>();
}  // namespace lohan
#else
namespace lohan {
extern const Kernels kernels_avx512 = {};
}  // namespace lohan
#endif
