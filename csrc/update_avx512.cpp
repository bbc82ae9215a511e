// AVX-512 kernels: sixteen elements at a time.
#include "update_kernel.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>

namespace lohan {
namespace {

struct Avx512 {
  static constexpr size_t width = 16;
  using F = __m512;
  using I = __m512i;
  static F set(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F sqrt(F a) { return _mm512_sqrt_ps(a); }
  static F abs(F a) { return _mm512_abs_ps(a); }
  static F with_sign(F x, F s) {
    __m512i sign = _mm512_and_si512(bits(s), iset(0x80000000u));
    F signed_x = _mm512_castsi512_ps(_mm512_or_si512(sign, bits(x)));
    signed_x = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(s, set(0.0f), _CMP_NEQ_UQ), signed_x);
    return _mm512_mask_mov_ps(signed_x, _mm512_cmp_ps_mask(s, s, _CMP_UNORD_Q), s);
  }

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
  static I quieted(F x) {  // the bits, with NaN as the quiet NaN
    return _mm512_mask_set1_epi32(_mm512_castps_si512(x), _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q),
                                  static_cast<int>(kQuietNan));
  }
  static void split(uint16_t* w, int16_t* r, F x) {
    __m512i u = quieted(x);
    store16(w, _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x8000)), 16));
    store16(r, u);
  }
  static void store_bf16(uint16_t* p, F x, I up) {
    store16(p, _mm512_srli_epi32(_mm512_add_epi32(quieted(x), up), 16));
  }

  static I iset(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
  static I lanes(uint32_t x) {
    return _mm512_mullo_epi32(
        iset(x), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  }
  static I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
  static I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
  static I imul(I a, I b) { return _mm512_mullo_epi32(a, b); }
  static I iand(I a, I b) { return _mm512_and_si512(a, b); }
  static I ixor(I a, I b) { return _mm512_xor_si512(a, b); }
  static I imin(I a, I b) { return _mm512_min_epu32(a, b); }
  static I imax(I a, I b) { return _mm512_max_epu32(a, b); }
  template <int by>
  static I shift_right(I a) {
    return _mm512_srli_epi32(a, by);
  }
  static uint32_t largest(I a) { return _mm512_reduce_max_epu32(a); }
  static I bits(F a) { return _mm512_castps_si512(a); }
  static I sign_mask(F a) { return _mm512_srai_epi32(bits(a), 31); }
  static F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  static I truncated(F a) { return _mm512_cvttps_epi32(a); }
  static __m128i load8(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
  static F load_i8(const int8_t* p) { return to_float(_mm512_cvtepi8_epi32(load8(p))); }
  static F load_u8(const uint8_t* p) { return to_float(_mm512_cvtepu8_epi32(load8(p))); }
  static void store8(uint8_t* p, I low_bytes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(low_bytes));
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
