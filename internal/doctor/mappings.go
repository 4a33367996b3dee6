package doctor

import (
	"context"
	"strings"
)

// notAnswering is the text for checks that only the daemon can answer.
const notAnswering = "not examined: cocoond does not answer"

// mappings reports problems with the mappings of image names. A daemon that does not answer is no finding: most hosts
// are examined before they have one.
func (d doctor) mappings(ctx context.Context) finding {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	problems, err := d.cfg.MappingProblems(ctx)
	if err != nil {
		return finding{status: OK, detail: notAnswering}
	}
	if len(problems) == 0 {
		return finding{status: OK, detail: "no problems"}
	}
	var all []string
	for _, p := range problems {
		where := p.Source + "/" + p.Mapping
		if p.Rule != "" {
			where += ", " + p.Rule
		}
		all = append(all, where+": "+p.Message)
	}
	return finding{Warn, strings.Join(all, "; "), "correct the mapping; it is read again at the next use"}
}
