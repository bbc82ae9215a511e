#include "crc32c.hpp"

#include <string.h>

#include <array>

#include "isa.hpp"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace lohan {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78u;
using Table = std::array<uint32_t, 256>;

// bytewise[k][b] is the contribution of byte b followed by k zero bytes.
std::array<Table, 8> make_bytewise() {
  std::array<Table, 8> t{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t crc = b;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) ? kPolynomial : 0u);
    t[0][b] = crc;
  }
  for (size_t k = 1; k < 8; ++k)
    for (size_t b = 0; b < 256; ++b) t[k][b] = (t[k - 1][b] >> 8) ^ t[0][t[k - 1][b] & 0xff];
  return t;
}

const std::array<Table, 8>& bytewise() {
  static const auto table = make_bytewise();
  return table;
}

#if defined(__x86_64__)
// The instruction has a latency of three cycles and a throughput of one, so three independent lanes
// of kLane bytes keep it busy. `shift` moves the register of a lane over the lanes that follow it.
constexpr size_t kLong = 8192, kShort = 256;

// Move a register over `bytes` zero bytes. The map is linear, so four tables represent it.
struct Shift {
  std::array<Table, 4> table;

  explicit Shift(size_t bytes) {
    for (size_t k = 0; k < 4; ++k)
      for (uint32_t b = 0; b < 256; ++b) table[k][b] = 0;
    for (uint32_t bit = 0; bit < 32; ++bit) {
      uint32_t moved = 1u << bit;
      for (size_t i = 0; i < bytes; ++i) moved = (moved >> 8) ^ bytewise()[0][moved & 0xff];
      for (uint32_t b = 0; b < 256; ++b)
        if (b & (1u << (bit % 8))) table[bit / 8][b] ^= moved;
    }
  }

  uint32_t operator()(uint32_t crc) const {
    return table[0][crc & 0xff] ^ table[1][(crc >> 8) & 0xff] ^ table[2][(crc >> 16) & 0xff] ^
           table[3][crc >> 24];
  }
};

inline uint64_t word(const unsigned char* p) {
  uint64_t x;
  memcpy(&x, p, 8);
  return x;
}

__attribute__((target("sse4.2,crc32"))) uint32_t three_lanes(const unsigned char*& p,
                                                             size_t& bytes, size_t lane,
                                                             const Shift& shift, uint32_t crc) {
  uint64_t a = crc;
  while (bytes >= 3 * lane) {
    uint64_t b = 0, c = 0;
    for (size_t i = 0; i < lane; i += 8) {
      a = _mm_crc32_u64(a, word(p + i));
      b = _mm_crc32_u64(b, word(p + lane + i));
      c = _mm_crc32_u64(c, word(p + 2 * lane + i));
    }
    a = shift(static_cast<uint32_t>(a)) ^ b;
    a = shift(static_cast<uint32_t>(a)) ^ c;
    p += 3 * lane;
    bytes -= 3 * lane;
  }
  return static_cast<uint32_t>(a);
}

__attribute__((target("sse4.2,crc32"))) uint32_t crc32c_sse42(const void* data, size_t bytes,
                                                              uint32_t seed) {
  static const Shift over_long(kLong), over_short(kShort);
  auto p = static_cast<const unsigned char*>(data);
  uint32_t crc = ~seed;
  crc = three_lanes(p, bytes, kLong, over_long, crc);
  crc = three_lanes(p, bytes, kShort, over_short, crc);
  for (; bytes >= 8; p += 8, bytes -= 8)
    crc = static_cast<uint32_t>(_mm_crc32_u64(crc, word(p)));
  for (; bytes > 0; ++p, --bytes) crc = _mm_crc32_u8(crc, *p);
  return ~crc;
}
#endif

}  // namespace

// Slicing by eight, with explicit byte order.
uint32_t crc32c_plain(const void* data, size_t bytes, uint32_t seed) {
  const auto& t = bytewise();
  auto p = static_cast<const unsigned char*>(data);
  uint32_t crc = ~seed;
  for (; bytes >= 8; p += 8, bytes -= 8) {
    crc = t[7][(crc & 0xff) ^ p[0]] ^ t[6][((crc >> 8) & 0xff) ^ p[1]] ^
          t[5][((crc >> 16) & 0xff) ^ p[2]] ^ t[4][(crc >> 24) ^ p[3]] ^ t[3][p[4]] ^ t[2][p[5]] ^
          t[1][p[6]] ^ t[0][p[7]];
  }
  for (; bytes > 0; ++p, --bytes) crc = (crc >> 8) ^ t[0][(crc ^ *p) & 0xff];
  return ~crc;
}

namespace {

// Multiply polynomials modulo kPolynomial; bit 31 is the coefficient of x^0.
uint32_t multiplied(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b >> 1) ^ ((b & 1u) ? kPolynomial : 0u);
  }
  return product;
}

}  // namespace

uint32_t crc32c_factor(size_t bytes) {
  uint32_t factor = 1u << 31, power = 1u << (31 - 8);  // x^0, and x^8: one byte
  for (; bytes != 0; bytes >>= 1, power = multiplied(power, power))
    if (bytes & 1) factor = multiplied(factor, power);
  return factor;
}

uint32_t crc32c_combine(uint32_t first, uint32_t second, uint32_t factor) {
  return multiplied(factor, first) ^ second;
}

uint32_t crc32c(const void* data, size_t bytes, uint32_t seed) {
#if defined(__x86_64__)
  // A forced plain instruction set also selects the plain checksum, because tests compare the two.
  static const bool fast = has_sse42();
  if (fast && isa() != Isa::plain) return crc32c_sse42(data, bytes, seed);
#endif
  return crc32c_plain(data, bytes, seed);
}

}  // namespace lohan
