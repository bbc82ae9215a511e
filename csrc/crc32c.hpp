// CRC-32C (Castagnoli, reflected polynomial 0x82f63b78), as iSCSI, ext4 and RocksDB use it.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace lohan {

// `seed` is the checksum of the preceding data: crc32c(b, crc32c(a)) is the checksum of a + b.
uint32_t crc32c(const void* data, size_t bytes, uint32_t seed);
uint32_t crc32c_plain(const void* data, size_t bytes, uint32_t seed);

// Return the checksum of a + b, given the checksums of a and of b and crc32c_factor(bytes of b).
// The factor is x^(8 * bytes) modulo the polynomial; checksums are linear in it.
uint32_t crc32c_factor(size_t bytes);
uint32_t crc32c_combine(uint32_t first, uint32_t second, uint32_t factor);

}  // namespace lohan
