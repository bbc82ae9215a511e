// AVX2 + F16C kernels: eight elements at a time.
#include "update_kernel.hpp"

#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>

namespace lohan {
namespace {

struct Avx2 {
  static constexpr size_t width = 8;
  using F = __m256;
  using I = __m256i;
  static F set(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F sqrt(F a) { return _mm256_sqrt_ps(a); }
  static F abs(F a) { return _mm256_andnot_ps(set(-0.0f), a); }
  static F with_sign(F x, F s) {
    F signed_x = _mm256_or_ps(_mm256_and_ps(s, set(-0.0f)), x);
    signed_x = _mm256_andnot_ps(_mm256_cmp_ps(s, _mm256_setzero_ps(), _CMP_EQ_OQ), signed_x);
    return _mm256_blendv_ps(signed_x, s, _mm256_cmp_ps(s, s, _CMP_UNORD_Q));
  }

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
  static I quieted(F x) {  // the bits, with NaN as the quiet NaN
    F nan = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(kQuietNan)));
    return _mm256_castps_si256(_mm256_blendv_ps(x, nan, _mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  }
  static void split(uint16_t* w, int16_t* r, F x) {
    __m256i u = quieted(x);
    store16(w, _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x8000)), 16));
    store16(r, _mm256_and_si256(u, _mm256_set1_epi32(0xffff)));
  }
  static void store_bf16(uint16_t* p, F x, I up) {
    store16(p, _mm256_srli_epi32(_mm256_add_epi32(quieted(x), up), 16));
  }

  static I iset(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
  static I lanes(uint32_t x) {
    return _mm256_mullo_epi32(iset(x), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
  static I isub(I a, I b) { return _mm256_sub_epi32(a, b); }
  static I imul(I a, I b) { return _mm256_mullo_epi32(a, b); }
  static I iand(I a, I b) { return _mm256_and_si256(a, b); }
  static I ixor(I a, I b) { return _mm256_xor_si256(a, b); }
  static I imin(I a, I b) { return _mm256_min_epu32(a, b); }
  static I imax(I a, I b) { return _mm256_max_epu32(a, b); }
  template <int by>
  static I shift_right(I a) {
    return _mm256_srli_epi32(a, by);
  }
  static uint32_t largest(I a) {
    __m128i x = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0x4e));
    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0xb1));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(x));
  }
  static I bits(F a) { return _mm256_castps_si256(a); }
  static I sign_mask(F a) { return _mm256_srai_epi32(bits(a), 31); }
  static F to_float(I a) { return _mm256_cvtepi32_ps(a); }
  static I truncated(F a) { return _mm256_cvttps_epi32(a); }
  static __m128i load8(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
  static F load_i8(const int8_t* p) { return to_float(_mm256_cvtepi8_epi32(load8(p))); }
  static F load_u8(const uint8_t* p) { return to_float(_mm256_cvtepu8_epi32(load8(p))); }
  static void store8(uint8_t* p, I low_bytes) {
    const __m128i pick = _mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    __m128i low = _mm_shuffle_epi8(_mm256_castsi256_si128(low_bytes), pick);
    __m128i high = _mm_shuffle_epi8(_mm256_extracti128_si256(low_bytes, 1), pick);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_unpacklo_epi32(low, high));
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
