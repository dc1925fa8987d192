"""The arithmetic by which the GPU's attention work is cut (csrc/attention/work_partition.h), on the host."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = r"""
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "attention/work_partition.h"

using namespace pagedinfer::attention;

#define EXPECT(condition)                                                     \
  if (!(condition)) {                                                         \
    std::printf("line %d: %s (case %d)\n", __LINE__, #condition, the_case);   \
    std::exit(1);                                                             \
  }

int main() {
  std::mt19937 random(1);
  auto in = [&](int low, int high) { return low + static_cast<int>(random() % (high - low + 1)); };
  for (int the_case = 0; the_case < 3000; ++the_case) {
    const bool deterministic = the_case % 2;
    const int grid = in(1, 40);
    std::vector<Unit> units;
    int total = 0;
    for (int i = in(1, 12); i > 0; --i) {
      const int tiles = in(1, in(1, 200));
      units.push_back({total, tiles, chunk_tiles(tiles, deterministic)});
      EXPECT(units.back().num_chunks() <= (deterministic ? kMaxChunks : tiles));
      total += tiles;
    }
    const Partition partition(total, grid);

    // Ranges are contiguous, cover the list and are no longer than they must be; block_of inverts
    // start.
    EXPECT(partition.start(0) == 0 && partition.start(grid) >= total);
    for (int b = 0; b < grid; ++b) {
      EXPECT(partition.start(b + 1) - partition.start(b) == larger(1, (total + grid - 1) / grid));
      for (int t = partition.start(b); t < partition.start(b + 1); ++t) EXPECT(partition.block_of(t) == b);
    }

    // What the blocks do, unit by unit, as the kernel walks it: every chunk falls to one block, and
    // every part is written to a slot of its block that nothing else in use occupies.
    std::set<int> slots_in_use, counters;
    for (const Unit& unit : units) {
      const int owner = partition.block_of(unit.begin);
      const ChunkSlots chunks(partition, unit);  // of no use outside deterministic mode
      std::vector<int> parts;  // slots, in order
      int covered = 0;
      for (int b = owner; b < grid; ++b) {
        const int begin = unit.cut(partition.start(b)), end = unit.cut(partition.start(b + 1));
        if (begin >= end) continue;
        EXPECT(begin == unit.begin + covered);
        covered = end - unit.begin;
        if (begin == unit.begin) {
          EXPECT(b == owner && (!deterministic || chunks.first_block == owner));
          const int last_chunk = (covered - 1) / unit.chunk;
          EXPECT(!deterministic || last_chunk + 1 == chunks.prefix_chunks);
          parts.push_back(deterministic ? chunks.prefix_slot(b, last_chunk) : part_slot(b, true));
        } else if (!deterministic) {
          parts.push_back(part_slot(b, false));
        } else {
          for (int t = begin; t < end; t += unit.chunk) {
            const int chunk = (t - unit.begin) / unit.chunk;
            EXPECT((t - unit.begin) % unit.chunk == 0);
            EXPECT(partition.block_of(t) == b);
            parts.push_back(chunks.later_slot(b, chunk));
          }
        }
      }
      EXPECT(covered == unit.num_tiles);
      const int num_parts =
          deterministic ? chunks.num_parts() : partition.num_blocks(unit.begin, unit.num_tiles);
      EXPECT(static_cast<int>(parts.size()) == num_parts);
      if (num_parts == 1) continue;
      EXPECT(counters.insert(owner).second);
      for (int i = 0; i < num_parts; ++i) {
        EXPECT(parts[i] == (deterministic ? chunks.slot(i) : part_slot(owner + i, i == 0)));
        EXPECT(parts[i] >= 0 && parts[i] < grid * kSlotsPerBlock);
        EXPECT(slots_in_use.insert(parts[i]).second);
      }
    }
  }

  // Units that are dealt: every one falls to one block, or is taken once; all blocks ask until there
  // is none, and no more often than they are counted.
  for (int the_case = 0; the_case < 3000; ++the_case) {
    const int blocks = in(1, 60);
    const UnitDeal deal{blocks + in(1, in(1, 500)), blocks};
    std::set<int> dealt;
    for (int block = 0; block < blocks; ++block) {
      for (int turn = 0; turn < deal.own(); ++turn) {
        EXPECT(dealt.insert(UnitDeal::unit(block, blocks, turn)).second);
      }
    }
    EXPECT(deal.own() >= 1 && *dealt.begin() == 0 && *dealt.rbegin() == deal.taken(0) - 1);
    int asked = 0, in_vain = 0;
    for (; in_vain < blocks; ++asked) {
      const int unit = deal.taken(asked);
      if (unit >= deal.num_units) ++in_vain;
      else EXPECT(dealt.insert(unit).second);
    }
    EXPECT(asked == deal.times_asked() && static_cast<int>(dealt.size()) == deal.num_units);
    const int tiles = in(1, 50);  // of each
    EXPECT(!(UnitDeal{blocks, blocks}.pays(tiles, tiles, blocks * tiles)));
    EXPECT((UnitDeal{8 * blocks, blocks}.pays(8, 8, 64 * blocks)));
    EXPECT(!(UnitDeal{2 * blocks, blocks}.pays(8, 8, 16 * blocks)));
    EXPECT((UnitDeal{4 * blocks, blocks}.pays(2, 10, 20 * blocks)));
  }

  // test_paged_attention_scale.py has a batch whose units are to be dealt: 9 sequences of 8 heads for
  // each multiprocessor, one in twenty of 5 tiles and the others of one.
  for (int the_case = 1; the_case <= 200; ++the_case) {
    const int num_seqs = 9 * the_case;
    int tiles = 0;
    for (int i = 0; i < num_seqs; ++i) tiles += i % 20 == 7 ? 5 : 1;
    for (const int head_dim : {64, 128, 256}) {
      EXPECT((UnitDeal{8 * num_seqs, decode_grid(the_case, head_dim)}.pays(1, 5, 8 * tiles)));
    }
  }

  // The bound on prefill tiles holds for random batches, and grows with each of its arguments.
  for (int the_case = 0; the_case < 3000; ++the_case) {
    const int group = in(1, 20), num_seqs = in(1, 30);
    int longest = 1, tokens = 0, tiles = 0;
    for (int i = 0; i < num_seqs; ++i) {
      const int query_len = in(0, in(1, 300));
      longest = larger(longest, query_len);
      tokens += query_len;
      if (query_len > 0 && !is_decode(query_len, group)) {
        tiles += ceil_div(query_len * group, kPrefillTileRows);
      }
    }
    const auto bound = max_prefill_tiles(num_seqs, tokens, longest, group);
    EXPECT(tiles <= bound);
    EXPECT(bound <= max_prefill_tiles(num_seqs + in(0, 3), tokens + in(0, 99), longest + in(0, 9),
                                      group));
    EXPECT(may_prefill(longest, group) || tiles == 0);
  }

  // Of the multiprocessors some prefill first: all without decode work, more the more there is to
  // prefill, and always enough that the others are no more than decode has use for.
  for (int the_case = 0; the_case < 3000; ++the_case) {
    const int sms = in(1, 200);
    const int64_t prefill = int64_t{in(1, 1 << 20)} << in(0, 20), decode = in(1, 1 << 30);
    const int blocks = prefill_blocks_beside_decode(sms, prefill, decode);
    EXPECT(prefill_blocks_beside_decode(sms, prefill, 0) == sms);
    EXPECT(blocks >= 1 && blocks <= sms);
    EXPECT((sms - blocks) * 100 <= sms * kDecodeShare);
    EXPECT(blocks <= prefill_blocks_beside_decode(sms, prefill + prefill / 2, decode));
    EXPECT(blocks >= prefill_blocks_beside_decode(sms, prefill, decode + decode / 2));
  }
  std::puts("ok");
}
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_partition_covers_the_work_and_finds_it_again(tmp_path: Path) -> None:
    source, program = tmp_path / "partition.cpp", tmp_path / "partition"
    source.write_text(PROGRAM)
    subprocess.run(
        [
            "c++",
            "-std=c++20",
            "-O1",
            "-Wall",
            "-Werror",
            f"-I{ROOT / 'csrc'}",
            str(source),
            "-o",
            str(program),
        ],
        check=True,
    )
    result = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "ok", result.stdout
