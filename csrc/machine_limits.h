// What this machine can do at most: the figures that `octavo bench ops` and `octavo profile` compare
// with.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "pool.h"

namespace octavo {

// Seconds in which the pool's threads read `bytes` at `data` once.
double seconds_to_read(Pool& pool, const Kernels& kernels, const uint8_t* data, int64_t bytes);

enum class Arithmetic { floats, bytes };

// Operations (multiplications and additions) per second of all the pool's threads together, in a
// loop of about `seconds`.
double operations_per_second(Pool& pool, const Kernels& kernels, Arithmetic arithmetic,
                             double seconds);

}  // namespace octavo
