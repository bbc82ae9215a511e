// Opening, creating and preallocating files.
#pragma once

#include <stdint.h>

#include <string>

namespace lohan {

struct OpenedFile {
  int fd;
  bool direct;  // false if the file system refuses O_DIRECT
};

// Open a file that must exist and have exactly `size` bytes.
OpenedFile open_file(const std::string& path, uint64_t size);

// Create a file with exactly `size` bytes, all of them allocated. A new file that cannot be
// allocated is removed again.
OpenedFile create_file(const std::string& path, uint64_t size);

}  // namespace lohan
