package doctor

import (
	"context"
	"fmt"
	"strings"
)

// strays reports VMs on this host that are not on record. A daemon that does not answer is no finding.
func (d doctor) strays(ctx context.Context) finding {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	all, err := d.cfg.Strays(ctx)
	if err != nil {
		return finding{status: OK, detail: notAnswering}
	}
	if len(all) == 0 {
		return finding{status: OK, detail: "all VMs of this host are in the journal"}
	}
	var ids []string
	for _, s := range all {
		ids = append(ids, string(s.ID))
	}
	return finding{
		Warn, fmt.Sprintf("%d VMs of this host are not in the journal: %s", len(all), strings.Join(ids, ", ")),
		"`cocoon recover` lists them; `cocoon recover adopt ID` makes one a VM again, `cocoon recover rm ID` removes it",
	}
}
