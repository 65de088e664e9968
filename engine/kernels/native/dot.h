// Products of narrow numbers, accumulated in wide lanes: the one place where ATen's types do not reach what processors
// have. Each function has a portable form, which the others must equal.
#pragma once

#include "vec.h"

namespace kvbaton {

// Two bfloat16 or four bytes, as they lie.
inline int32_t read_int(const void* source) {
  int32_t value;
  std::memcpy(&value, source, sizeof(value));
  return value;
}

// acc[i] += lo(a[i]) * lo(b[i]) + hi(a[i]) * hi(b[i]) over pairs of bfloat16 in 32 bits.
inline Vec dot_pair(const Vec& acc, const IntVec& a, const IntVec& b) {
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
  return _mm512_dpbf16_ps(acc, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
#else
  const IntVec high(static_cast<int32_t>(0xffff0000u)), shift(16);
  const Vec low = at::vec::fmadd(at::vec::cast<float>(a << shift), at::vec::cast<float>(b << shift), acc);
  return at::vec::fmadd(at::vec::cast<float>(a & high), at::vec::cast<float>(b & high), low);
#endif
}

// acc[i] += sum over j of byte j of w[i], unsigned, times byte j of a, signed.
inline IntVec dot_quad(const IntVec& acc, const IntVec& w, int32_t a) {
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512VNNI__)
  return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(a));
#elif defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
  // Bytes 0 and 2, then 1 and 3, as 16-bit pairs: vpmaddubsw would saturate. What is done to `a` and to `w` alone is
  // shared by all products of a tile that take them.
  const IntVec pairs(a);
#if defined(CPU_CAPABILITY_AVX512)
  const __m512i a_even = _mm512_srai_epi16(_mm512_slli_epi16(pairs, 8), 8), a_odd = _mm512_srai_epi16(pairs, 8);
  const __m512i w_even = w & IntVec(0x00ff00ff), w_odd = _mm512_srli_epi16(w, 8);
  return acc + IntVec(_mm512_madd_epi16(w_even, a_even)) + IntVec(_mm512_madd_epi16(w_odd, a_odd));
#else
  const __m256i a_even = _mm256_srai_epi16(_mm256_slli_epi16(pairs, 8), 8), a_odd = _mm256_srai_epi16(pairs, 8);
  const __m256i w_even = w & IntVec(0x00ff00ff), w_odd = _mm256_srli_epi16(w, 8);
  return acc + IntVec(_mm256_madd_epi16(w_even, a_even)) + IntVec(_mm256_madd_epi16(w_odd, a_odd));
#endif
#else
  IntVec result = acc;
  for (int j = 0; j < 4; ++j) {
    const IntVec bytes = (w >> IntVec(8 * j)) & IntVec(0xff);
    result = result + bytes * IntVec(static_cast<int8_t>(static_cast<uint32_t>(a) >> (8 * j)));
  }
  return result;
#endif
}

}  // namespace kvbaton
