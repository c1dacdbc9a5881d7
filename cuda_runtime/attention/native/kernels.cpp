// Flash-style attention straight over the cells of a pool: lays one forward out as work for threads.
//
// Tokens that stand alone in their row (decodes) go one by one (alone.h). Tokens of one row that ride together (a
// prefill) form tiles of queries (tiles.h); on a CPU with AMX, over a bfloat16 pool, on its matrix unit (amx.h).

#include "kernels.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "alone.h"
#include "amx.h"
#include "tiles.h"
#include "tokens.h"

namespace microtome {
namespace {

constexpr int64_t kAlone = 2;           // a run this narrow is taken token by token
constexpr int64_t kSerialWork = 16384;  // multiply-adds (of whole vectors) below which one thread is quicker

// A lone token, whole (partials < 0) or a few of its chunks.
struct Alone {
  int64_t token;
  int64_t first_chunk, last_chunk;
  int64_t partials;  // offset in floats
};

struct Split {
  int64_t token;
  int64_t chunks;
  int64_t partials;
};

struct Work {
  std::vector<Tile> tiles;
  std::vector<Alone> alone;
  std::vector<Split> splits;
  std::vector<amx::Run> packs;
  int64_t partial_floats = 0;
  int64_t tile_vectors = 1;
  int64_t cost = 0;
};

int64_t chunks_of(const Softmax& softmax, int64_t position) {
  return (position - first_seen(softmax, position)) / kChunk + 1;
}

Work lay_out(const Forward& f, const Softmax& softmax, bool all_bf16) {
  Work work;
  const int64_t group = f.heads / f.kv_heads;
  const bool matrix_unit = f.pool_type == Type::BF16 && all_bf16 && amx::usable();
  std::vector<int64_t> lone;
  int64_t widest_run = 0;
  for (int64_t begin = 0, end = 0; begin < f.tokens; begin = end) {
    for (end = begin + 1; end < f.tokens && f.token_rows[end] == f.token_rows[begin];) ++end;
    int64_t lowest = f.positions[begin], highest = lowest;
    for (int64_t t = begin; t < end; ++t) {
      lowest = std::min<int64_t>(lowest, f.positions[t]);
      highest = std::max<int64_t>(highest, f.positions[t]);
      work.cost += (f.positions[t] + 1 - first_seen(softmax, f.positions[t])) * f.heads * f.size / kLanes;
    }
    if (end - begin <= kAlone || highest == 0) {  // highest 0: padding, one cell
      for (int64_t t = begin; t < end; ++t) lone.push_back(t);
      continue;
    }
    const int64_t queries = (end - begin) * group;
    const bool packed = matrix_unit && queries >= amx::kWidth / 2;
    if (!packed) widest_run = std::max(widest_run, queries);
    for (int64_t g = 0; g < f.kv_heads; ++g) {
      int64_t pack = -1;
      if (packed) {
        pack = int64_t(work.packs.size());
        work.packs.push_back({f.token_rows[begin], g, first_seen(softmax, lowest), highest + 1, 0});
      }
      work.tiles.push_back({begin, g, 0, queries, pack});
    }
  }
  while (work.tile_vectors < kWidestTile && work.tile_vectors * kLanes < widest_run) work.tile_vectors *= 2;
  std::vector<Tile> runs;
  runs.swap(work.tiles);
  for (const Tile& run : runs) {  // the last tile of a run sees most: it goes first
    const int64_t width = run.pack < 0 ? work.tile_vectors * kLanes : amx::kWidth;
    for (int64_t begin = (run.end - 1) / width * width; begin >= 0; begin -= width) {
      work.tiles.push_back({run.first_token, run.kv_head, begin, std::min(run.end, begin + width), run.pack});
    }
  }
  const bool share = f.threads > 1 && int64_t(lone.size() + work.tiles.size()) < 2 * f.threads;
  for (int64_t token : lone) {
    const int64_t chunks = chunks_of(softmax, f.positions[token]);
    if (!share || chunks == 1) {
      work.alone.push_back({token, 0, chunks, -1});
      continue;
    }
    const int64_t each = std::max<int64_t>(1, chunks / (4 * f.threads));
    work.splits.push_back({token, chunks, work.partial_floats});
    for (int64_t c = 0; c < chunks; c += each) {
      work.alone.push_back({token, c, std::min(chunks, c + each), work.partial_floats});
    }
    work.partial_floats += chunks * Partial::floats(f);
  }
  return work;
}

template <typename Cell>
void run_tile(const Forward& f, const Softmax& softmax, const Tokens& q, const Tokens& out, const Tile& tile,
              int64_t vectors) {
  switch (vectors) {
    case 1: attend_tile<Cell, 1>(f, softmax, q, out, tile); break;
    case 2: attend_tile<Cell, 2>(f, softmax, q, out, tile); break;
    default: attend_tile<Cell, kWidestTile>(f, softmax, q, out, tile);
  }
}

template <typename Cell>
void attend_as(const Forward& f, const Tokens& q, const Softmax& softmax, const Tokens& out) {
  Work work = lay_out(f, softmax, q.type == Type::BF16 && out.type == Type::BF16);
  std::unique_ptr<float[]> partials(work.partial_floats ? new float[work.partial_floats] : nullptr);
  amx::Packed packed(f, work.packs);
  const int64_t tiles = int64_t(work.tiles.size()), alone = int64_t(work.alone.size());
  const int threads = work.cost < kSerialWork ? 1 : f.threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    if (packed.pieces() > 0) {
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < packed.pieces(); ++i) packed.fill(f, i);
      amx::configure();
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < tiles + alone; ++i) {
      if (i >= tiles) {
        const Alone& a = work.alone[i - tiles];
        float* to = a.partials < 0 ? nullptr : partials.get() + a.partials;
        attend_alone<Cell>(f, softmax, q, out, a.token, a.first_chunk, a.last_chunk, to);
      } else if (work.tiles[i].pack >= 0) {
        const Tile& t = work.tiles[i];
        packed.attend(f, softmax, q, out, t.first_token, t.begin, t.end, t.pack, scratch(amx::scratch_floats(f.size)));
      } else {
        run_tile<Cell>(f, softmax, q, out, work.tiles[i], work.tile_vectors);
      }
    }
    if (packed.pieces() > 0) amx::release();
  }
  for (const Split& split : work.splits) {
    const int64_t partial = Partial::floats(f);
    Partial state(scratch(partial), f.heads);
    start(f, softmax, state);
    for (int64_t c = 0; c < split.chunks; ++c) {
      merge(f, state, Partial(partials.get() + split.partials + c * partial, f.heads));
    }
    finish(f, state, out, split.token);
  }
}

template <typename Cell>
void write_as(const Forward& f, const Tokens& tokens, void* pool, const int32_t* cells, int64_t t) {
  for (int64_t g = 0; g < f.kv_heads; ++g) {
    const int64_t from = t * tokens.token_stride + g * tokens.head_stride;
    Cell* to = static_cast<Cell*>(pool) + (int64_t{cells[t]} * f.kv_heads + g) * f.size;
    for (int64_t d = 0; d < f.size; d += kLanes) store(to + d, load_at(tokens, from + d));
  }
}

}  // namespace

void write_cells(const Forward& f, const Tokens& k, const Tokens& v, const int32_t* cells) {
  const int threads = f.tokens < 64 ? 1 : f.threads;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < f.tokens; ++t) {
    if (f.pool_type == Type::F32) {
      write_as<float>(f, k, f.k_pool, cells, t);
      write_as<float>(f, v, f.v_pool, cells, t);
    } else {
      write_as<bf16>(f, k, f.k_pool, cells, t);
      write_as<bf16>(f, v, f.v_pool, cells, t);
    }
  }
}

void attend(const Forward& forward, const Tokens& q, const Softmax& softmax, const Tokens& out) {
  if (forward.pool_type == Type::F32) {
    attend_as<float>(forward, q, softmax, out);
  } else {
    attend_as<bf16>(forward, q, softmax, out);
  }
}

const char* instruction_set() {
  if (amx::usable()) return "AVX-512 and AMX";
#if defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#elif defined(__aarch64__)
  return "NEON";
#else
  return "baseline";
#endif
}

}  // namespace microtome
