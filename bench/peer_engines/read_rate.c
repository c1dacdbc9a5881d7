/* Reads memory with all of a team's threads, as weights are read by a forward: once through, in order.

   What is read is combined, so that no read can be left out; the result has no meaning. A step is four cache lines; the
   memory begins at one, and `count` lines are a multiple of four for each thread. */

#include <omp.h>
#include <stddef.h>
#include <stdint.h>

typedef uint64_t line __attribute__((vector_size(64)));

enum { STEP = 4, AHEAD = 64 }; /* lines */

uint64_t read_all(const line *lines, size_t count, int threads) {
  uint64_t all = 0;
#pragma omp parallel num_threads(threads) reduction(^ : all)
  {
    size_t part = count / (size_t)threads / STEP * STEP;
    const line *own = lines + part * (size_t)omp_get_thread_num();
    line a = {0}, b = {0}, c = {0}, d = {0};
    for (size_t i = 0; i < part; i += STEP) {
      for (int near = 0; near < STEP; near++) __builtin_prefetch(own + i + AHEAD + near);
      a ^= own[i], b ^= own[i + 1], c ^= own[i + 2], d ^= own[i + 3];
    }
    a ^= b ^ c ^ d;
    for (int word = 0; word < 8; word++) all ^= a[word];
  }
  return all;
}
