package cli

import (
	"cmp"
	"context"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/vm"
)

// seconds is the value of a flag for a duration, in seconds if it has no unit.
type seconds time.Duration

func (s *seconds) Type() string   { return "duration" }
func (s *seconds) String() string { return time.Duration(*s).String() }

func (s *seconds) Set(v string) error {
	if _, err := strconv.Atoi(v); err == nil {
		v += "s"
	}
	d, err := time.ParseDuration(v)
	if err != nil {
		return errdefs.Invalidf("it is a number of seconds or a duration such as 1m30s")
	}
	*s = seconds(d)
	return nil
}

var sizeUnits = []string{"", "K", "M", "G", "T", "P"} // powers of 1024

// ParseSize parses a number of bytes: 512M, 1.5G, 10GiB, 4096. The units K, M, G, T and P are powers of 1024, in
// either case, with or without "i" and "B".
func ParseSize(s string) (int64, error) {
	number := strings.TrimRight(s, "kKmMgGtTpPiIbB")
	unit := strings.ToUpper(s[len(number):])
	for exp, u := range sizeUnits {
		if unit != u && unit != u+"B" && (u == "" || unit != u+"I" && unit != u+"IB") {
			continue
		}
		if strings.ContainsFunc(number, func(r rune) bool { return r != '.' && (r < '0' || r > '9') }) {
			break
		}
		if n, err := strconv.ParseInt(number, 10, 64); err == nil {
			if n > math.MaxInt64>>(10*exp) {
				return 0, errdefs.Invalidf("size %q is too large", s)
			}
			return n << (10 * exp), nil
		}
		f, err := strconv.ParseFloat(number, 64)
		if err != nil {
			break
		}
		if f *= math.Ldexp(1, 10*exp); f >= math.MaxInt64 {
			return 0, errdefs.Invalidf("size %q is too large", s)
		}
		return int64(f), nil
	}
	return 0, errdefs.Invalidf("%q is not a size; write for example 512M, 1.5G or 10G", s)
}

// FormatSize prints bytes the way ParseSize reads them, with at most one digit after the point.
func FormatSize(n int64) string {
	if n < 0 {
		return strconv.FormatInt(n, 10)
	}
	exp := 0
	f := float64(n)
	for f >= 1023.95 && exp < len(sizeUnits)-1 {
		f /= 1024
		exp++
	}
	return strings.TrimSuffix(strconv.FormatFloat(f, 'f', 1, 64), ".0") + sizeUnits[exp]
}

// sizeFlag is a size on the command line; zero is refused, because the engine treats it as "not given".
type sizeFlag int64

func (s *sizeFlag) String() string { return FormatSize(int64(*s)) }
func (s *sizeFlag) Type() string   { return "size" }

func (s *sizeFlag) Set(v string) error {
	n, err := ParseSize(v)
	if err != nil {
		return err
	}
	if n == 0 {
		return errdefs.Invalidf("it must be more than 0")
	}
	*s = sizeFlag(n)
	return nil
}

func (a *app) vmResizeCommand() *cobra.Command {
	var out format
	var to vm.Size
	var memory sizeFlag
	cmd := &cobra.Command{
		Use: "resize REF", Short: "Give a running VM more CPUs or memory", Args: cobra.ExactArgs(1),
		Long: `Give a running VM more CPUs or memory, up to the maximum that it was created with. What is left out stays. Nothing is taken
away. The guest of a container image cannot grow.` + refHelp,
		Example:           "  cocoon vm resize ubuntu --cpu 4 --memory 8G",
		ValidArgsFunction: inTurn(a.completeVMs),
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			now, err := c.Inspect(ctx, args[0])
			if err != nil {
				return err
			}
			to := vm.Size{CPUs: cmp.Or(to.CPUs, now.Spec.CPUs), Memory: cmp.Or(int64(memory), now.Spec.Memory)}
			r, err := c.Resize(ctx, string(now.ID), to)
			return a.printVM(r, out, err)
		}),
	}
	cmd.Flags().IntVar(&to.CPUs, "cpu", 0, "number of CPUs")
	cmd.Flags().Var(&memory, "memory", "size of the memory")
	outputFlag(cmd, &out)
	return cmd
}

// hugePagesFlag is a size of huge pages: 2Mi or 1Gi.
type hugePagesFlag vm.HugePages

func (p *hugePagesFlag) Type() string   { return "size" }
func (p *hugePagesFlag) String() string { return vm.HugePages(*p).String() }

func (p *hugePagesFlag) Set(v string) error {
	size, err := vm.ParseHugePages(v)
	*p = hugePagesFlag(size)
	return err
}
