// Sum of squares in double precision; the same bits whatever the instruction set or thread count.
#pragma once

#include <stddef.h>

#include "update.hpp"

namespace lohan {

double sum_squares(const void* data, Grad type, size_t count);

}  // namespace lohan
