// A small persistent thread pool for the kernels. Several callers may use it at once; each takes
// part in its own work, so a call finishes even if no helper is free.
#pragma once

#include <stddef.h>

#include <functional>

namespace lohan {

int threads();
void set_threads(int count);  // throws std::invalid_argument

// Calls body(0) .. body(blocks - 1), each once, on up to threads() threads. body must not throw.
void parallel_for(size_t blocks, const std::function<void(size_t)>& body);

}  // namespace lohan
