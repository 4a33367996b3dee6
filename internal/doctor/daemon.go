package doctor

import (
	"context"
	"fmt"
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

// pools reports thin pools in which no volume can be made, and how full the others are. A daemon that does not answer is no finding.
func (d doctor) pools(ctx context.Context) finding {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	all, err := d.cfg.Pools(ctx)
	if err != nil {
		return finding{status: OK, detail: notAnswering}
	}
	if len(all) == 0 {
		return finding{status: OK, detail: "none: volumes are files; `cocoond --volume-pool VG/POOL` uses a thin pool of LVM"}
	}
	var good, bad []string
	for _, p := range all {
		if p.Fault != "" {
			bad = append(bad, p.Fault)
			continue
		}
		part := func(used, size int64) int64 { return used * 100 / max(size, 1) }
		good = append(good, fmt.Sprintf("%s zeroes its blocks; %d %% of its data and %d %% of its metadata are in use", p.Name, part(p.Used, p.Size), part(p.MetadataUsed, p.MetadataSize)))
	}
	if len(bad) > 0 {
		return finding{Warn, strings.Join(bad, "; "), "correct what it reports; the pool is examined again every 10 s"}
	}
	return finding{status: OK, detail: strings.Join(good, "; ")}
}

// drivers reports the hypervisors that VMs can ask for. One that the node lacks is no fault, unless it is the default. A daemon that does not
// answer is no finding. VM pods of a kubelet need theirs, too. A hypervisor without firmware runs container images only; `cocoon node info` says what it lacks.
func (d doctor) drivers(ctx context.Context) finding {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	all, err := d.cfg.Drivers(ctx)
	if err != nil {
		return finding{status: OK, detail: notAnswering}
	}
	pods := ""
	if d.cfg.Kubelet != nil {
		pods = d.cfg.Kubelet.Driver
	}
	var said []string
	for _, x := range all {
		switch {
		case x.Error == "":
			text := strings.TrimSpace(x.Name+" "+x.Version) + " by " + x.Accel
			if len(x.Firmware) == 0 {
				text += ", no disk images"
			}
			if x.Name == pods && !x.Default {
				text += ", for VM pods of the kubelet"
			}
			said = append(said, text)
		case x.Default:
			return finding{Warn, x.Name + ", the default: " + x.Error, "do what it says, or choose another default by `cocoond --driver`"}
		case x.Name == pods:
			return finding{Warn, x.Name + ", in which VM pods of the kubelet run: " + x.Error, "do what it says"}
		default:
			said = append(said, "not "+x.Name+": "+x.Error)
		}
	}
	return finding{status: OK, detail: strings.Join(said, "; ")}
}

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
