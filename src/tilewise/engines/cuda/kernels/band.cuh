// Which key tiles a query tile visits where the mask is a band: query q sees keys q + low to q + high.
//
//   rows of the tile   \ . . . \                 . seen
//                       \ . . . \
//   key tiles        | lower | full | upper |    the band's edges cut those at both ends, which are masked
//
// Masked tiles come first, those of the upper end before all: a causal mask's rows have their own key there, and most of them in the first tile.

struct BandTiles {
    int first, last;                                            // key tiles of which some row sees a key; last < first: there are none
    int lower, upper;                                           // masked are first .. lower - 1 and upper .. last

    DEV BandTiles() {}
    // row: the tile's first; rows: how many it has, up to the end of the sequence
    DEV BandTiles(int row, int rows, int n_kv, int low, int high) {
        int bottom = max(row + low, 0), top = min(row + rows - 1 + high, n_kv - 1);
        first = bottom / BN;
        last = top < bottom ? first - 1 : top / BN;
        int from = max(row + rows - 1 + low, 0), to = min(row + high, n_kv - 1);   // keys that all rows see
        upper = min(max(max(to + 1, 0) / BN, first), last + 1);
        lower = min(max((from + BN - 1) / BN, first), upper);
    }
    DEV int steps() const { return last - first + 1; }
    DEV int masked() const { return last + 1 - upper + lower - first; }
    DEV int tile(int step) const {                              // the key tile of a step
        int below = step - (last + 1 - upper);                  // after those of the upper end
        return below < 0 ? last - step : below < lower - first ? first + below : upper - 1 - (below - (lower - first));
    }
};
