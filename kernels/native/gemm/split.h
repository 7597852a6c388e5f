// Division of a product with panels into units.
#pragma once

#include <algorithm>

#include "gemm/tile.h"

namespace npuserve {
namespace NPUSERVE_ISA {

// Accumulators of a tile. With few registers, weights and x take more of them than in other kernels.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int TILE_ACC = 5;
#else
constexpr int TILE_ACC = MAX_ACC;
#endif
// Maximum rows of a tile: with panels used once or unpacked by each tile, and with panels that several tiles share, for
// few rows and for many. The rows of a tile share the widening of bfloat16 in registers.
constexpr int ONCE_ROWS = TILE_ACC >= 24 ? TILE_ACC / 2 : TILE_ACC;
constexpr int FEW_ROWS = BF16_DOT && ONCE_ROWS > 8 ? 8 : ONCE_ROWS;
constexpr int MANY_ROWS = TILE_ACC < 6 ? TILE_ACC : 6;
constexpr int MAX_PANELS = 4;
constexpr int widest_tile(int rows) { return panels_for(rows, MAX_PANELS, TILE_ACC); }

// Division into groups of panels times groups of rows. With `once` all rows are one tile, and each weight is read from
// memory into registers. Otherwise the rows of a unit are divided into tiles of about the same size, which share panels
// in the cache.
struct Split {
    int64_t panels, panels_per_unit, panel_groups, rows_per_unit, row_groups;
    int tile_rows, tile_panels;
    bool once, few;
    bool whole;  // a tile multiplies all of K at once, and its outputs are stored at once

    Split() {}

    // one_block: a tile may multiply all of K at once. prefers_tall_tiles: a tile works as long on its panels for few rows
    // as for many.
    Split(int64_t rows, int64_t words, int64_t columns, int threads, bool paired, bool one_block,
          bool prefers_tall_tiles) {
        panels = ceil_div<int64_t>(columns, LANES);
        once = rows <= ONCE_ROWS, whole = once || one_block;
        few = rows <= NARROW_ROWS;
        if (once) {
            // Small units, so that all threads end at about the same time.
            tile_rows = int(rows);
            tile_panels = tile_panels_of(tile_rows, paired);
            int64_t bytes = tile_panels * words * 64;
            panels_per_unit = tile_panels * std::max<int64_t>(1, UNIT_BYTES / bytes);
            rows_per_unit = rows;
        } else {
            // With too few columns for all threads to end together, units are narrower. Many rows are divided too.
            tile_rows = prefers_tall_tiles ? ONCE_ROWS : few && !paired ? FEW_ROWS : MANY_ROWS;
            if (few && panels < MIN_UNITS_PER_THREAD * threads * widest_tile(tile_rows)) tile_rows = ONCE_ROWS;
            tile_panels = tile_panels_of(tile_rows, paired);
            int64_t tiles = ceil_div(panels, int64_t(tile_panels)), least = UNITS_PER_THREAD * threads;
            int64_t most = whole ? MAX_WHOLE_ROWS : MAX_UNIT_ROWS;
            int64_t cuts = few ? 1 : std::max(ceil_div(least, tiles), ceil_div(rows, most));
            rows_per_unit = ceil_div(ceil_div(rows, cuts), int64_t(tile_rows)) * tile_rows;
            // A block of x serves all panels of a unit. Without blocks, small units let all threads end together.
            int64_t unit_tiles = whole && !few ? 1 : std::clamp<int64_t>(tiles * cuts / least, 1, MAX_UNIT_TILES);
            panels_per_unit = tile_panels * unit_tiles;
        }
        rows_per_unit = std::max<int64_t>(rows_per_unit, 1);
        panel_groups = ceil_div(panels, panels_per_unit);
        row_groups = ceil_div(rows, rows_per_unit);
    }
#if defined(__AMX_TILE__)
    // Division for pairs of tiles of 16 rows, which are multiplied by two panels (amx_product.h).
    static Split of_tiles(int64_t rows, int64_t words, int64_t columns, int threads) {
        Split made;
        made.panels = ceil_div<int64_t>(columns, LANES), made.tile_panels = 2;
        int64_t tiles = ceil_div<int64_t>(made.panels, 2);
        if (rows <= NARROW_ROWS) {
            made.rows_per_unit = rows;
            // Long units, since each begins with panels that are not prefetched.
            int64_t most = TILE_UNIT_BYTES / (2 * words * 64);
            made.panels_per_unit = 2 * std::max<int64_t>(1, std::min(most, tiles / (8 * threads)));
        } else {
            int64_t cuts = ceil_div(rows, TILE_UNIT_ROWS);
            made.rows_per_unit = ceil_div<int64_t>(ceil_div(rows, cuts), 32) * 32;
            made.panels_per_unit = 2 * std::clamp<int64_t>(tiles * cuts / (4 * threads), 1, 8);
        }
        made.rows_per_unit = std::max<int64_t>(made.rows_per_unit, 1);
        made.panel_groups = ceil_div(made.panels, made.panels_per_unit);
        made.row_groups = ceil_div(rows, made.rows_per_unit);
        return made;
    }
#endif
    int64_t units() const { return panel_groups * row_groups; }
    // Units of the same panels are adjacent.
    int64_t row_group(int64_t unit) const { return unit % row_groups; }
    int64_t panel_group(int64_t unit) const { return unit / row_groups; }
    static int tile_panels_of(int rows, bool paired) {
        return paired ? std::max(2, widest_tile(rows) / 2 * 2) : widest_tile(rows);
    }

    static constexpr int64_t UNIT_BYTES = 64 << 10, TILE_UNIT_BYTES = 256 << 10;
    static constexpr int64_t TILE_UNIT_ROWS = 256;
    static constexpr int64_t UNITS_PER_THREAD = 16, MIN_UNITS_PER_THREAD = 10;
    static constexpr int64_t NARROW_ROWS = 64;
    // Maximum rows of a unit, and tiles of panels: their accumulators and a block of x stay in the second-level cache.
    static constexpr int64_t MAX_UNIT_ROWS = 252, MAX_UNIT_TILES = 4;
    // Maximum rows of a unit without accumulators between blocks: x passes through the cache once for each tile of
    // panels, and few units expand the same panels.
    static constexpr int64_t MAX_WHOLE_ROWS = 516;
};

}  // namespace NPUSERVE_ISA
}  // namespace npuserve
