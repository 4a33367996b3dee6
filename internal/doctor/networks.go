package doctor

import (
	"context"
	"fmt"
	"strings"
)

// networks reports networks that VMs cannot use, such as a conflist whose plugins are not installed. A daemon that does
// not answer is no finding.
func (d doctor) networks(ctx context.Context) finding {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	all, err := d.cfg.Networks(ctx)
	if err != nil {
		return finding{status: OK, detail: notAnswering}
	}
	var up, down []string
	for _, n := range all {
		if n.Error != "" {
			down = append(down, n.Name+": "+n.Error)
			continue
		}
		up = append(up, fmt.Sprintf("%s (%s)", n.Name, n.Kind))
	}
	switch {
	case len(down) > 0:
		return finding{Warn, strings.Join(down, "; "), "correct what it reports; the network is tried again at its next use"}
	case len(up) == 0:
		return finding{status: OK, detail: "none: VMs have no interfaces"}
	}
	return finding{status: OK, detail: strings.Join(up, ", ")}
}
