/* Reads memory with all of a team's threads, as weights are read by a forward: once through, in order.

   The words are combined, so that no read can be left out; the result has no meaning. `count` is a multiple of 8. */

#include <stddef.h>
#include <stdint.h>

enum { BLOCK = 8192, AHEAD = 512 }; /* words of 8 bytes */

uint64_t read_all(const uint64_t *words, size_t count, int threads) {
  uint64_t all = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(^ : all)
  for (size_t block = 0; block < count; block += BLOCK) {
    size_t end = block + BLOCK < count ? block + BLOCK : count;
    uint64_t lanes[32] = {0};
    size_t i = block;
    for (; i + 32 <= end; i += 32) {
      for (int line = 0; line < 32; line += 8) __builtin_prefetch(words + i + AHEAD + line);
      for (int lane = 0; lane < 32; lane++) lanes[lane] ^= words[i + lane];
    }
    for (; i < end; i++) lanes[0] ^= words[i];
    for (int lane = 0; lane < 32; lane++) all ^= lanes[lane];
  }
  return all;
}
