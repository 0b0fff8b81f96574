package sliding

import "slices"

// PeakParts is how many parts a window has for a Peak.
const PeakParts = 12

// PeakPart returns the length of one part, rounded up so that PeakParts of them are no shorter than the window.
func PeakPart(window int64) int64 { return ceilDiv(window, PeakParts) }

// A Peak remembers the highest value for one window, and for at most one part of it longer. The caller says when the
// next part begins. The zero Peak is ready to use.
type Peak struct {
	parts [PeakParts + 1]int64 // parts[0] is under way, parts[1] was before it, ...
}

// Note raises the part under way to the value.
func (p *Peak) Note(value int64) { p.parts[0] = max(p.parts[0], value) }

// Turn begins the next part, with the value at its beginning, and forgets the oldest.
func (p *Peak) Turn(value int64) {
	copy(p.parts[1:], p.parts[:])
	p.parts[0] = value
}

// MaxAfter returns the highest value of the parts that are still remembered after so many more turns, 0 or more.
func (p *Peak) MaxAfter(turns int) int64 {
	if turns > PeakParts {
		return 0
	}
	return slices.Max(p.parts[:PeakParts+1-turns])
}
