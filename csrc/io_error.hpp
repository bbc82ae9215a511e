// The exception of the engines; bind_io.cpp converts it to lohan.errors.StorageIOError.
#pragma once

#include <stdint.h>

#include <stdexcept>
#include <string>

namespace lohan {

struct IoError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::string errno_text(int error);    // "ENOSPC (No space left on device)"
std::string next_move(int error);     // what the user can do about it
IoError file_error(const std::string& what, const std::string& path, int error);

}  // namespace lohan
