package cli

import (
	"fmt"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"cocoonstack.io/cocoon/internal/errdefs"
)

// accepted is a flag of the documented command line that has no effect here. It is accepted, so that scripts and programs
// written for other versions run. If it is used, one line on standard error gives the reason.
type accepted struct {
	flag    string
	value   string // name of the value in the help; "": none, the flag is a switch
	reason  string // completes "--flag has no effect: "
	command string // commands that have it, separated by "|"; "": all
}

const (
	makes  = "vm run|vm create|vm debug"
	number = "SECONDS" // a value that is checked
)

var acceptedFlags = []accepted{
	{"config", "FILE", "cocoon has no configuration file; the one of cocoond is a flag of cocoond", ""},
	{"root-dir", "DIR", "images and disks are cocoond's; its --state-dir is their folder", ""},
	{"log-dir", "DIR", "cocoon writes no log; `cocoon vm logs` shows those of VMs", ""},
	{"log-level", "LEVEL", "cocoon writes no log; --log-level of cocoond is for that of the node", ""},
	{"cni-conf-dir", "DIR", "networks are cocoond's; it has a flag of this name", ""},
	{"cni-bin-dir", "DIR", "networks are cocoond's; it has a flag of this name", ""},
	{"dns", "ADDRESS,...", "guests get the DNS servers of their network; set network.dns of cocoond", ""},

	{"data-disk", "SPEC", "a VM has one writable disk; give it the space with --storage", makes + "|vm clone"},
	{"queue-size", "N", "the hypervisor chooses the size of queues", makes + "|vm clone"},
	{"disk-queue-size", "N", "the hypervisor chooses the size of queues", makes + "|vm clone"},
	{"no-direct-io", "", "disks always use the host's page cache", makes + "|vm clone"},

	{"user", "NAME", "the guest has the users of its snapshot", "vm clone"},
	{"password", "PASSWORD", "the guest has the users of its snapshot", "vm clone"},
	{"on-demand", "", "memory is always fetched on demand", "vm clone|vm restore"},
	{"cpu", "N", "the VM has the CPUs that it was saved with", "vm restore"},
	{"memory", "SIZE", "the VM has the memory that it was saved with", "vm restore"},
	{"storage", "SIZE", "the VM has the disk that it was saved with", "vm restore"},

	{"interval", number, "changes are followed as they happen, not polled", "vm status"},

	{"max-cpu", "N", "a VM has the CPUs that it starts with", "vm debug"},
	{"balloon", "MB", "a balloon has no fixed size", "vm debug"},
	{"cow", "PATH", "cocoond chooses the path of the disk", "vm debug"},
	{"ch", "PATH", "--driver chooses the hypervisor, and the file of cocoond names its program (cloudHypervisor.binary)", "vm debug"},
}

// acceptedShort are the one-letter names of accepted flags.
var acceptedShort = map[string]string{"interval": "n"}

func (f accepted) of(command string) bool {
	for name := range strings.SplitSeq(f.command, "|") {
		if name == command {
			return true
		}
	}
	return false
}

// unused is the value of an accepted flag.
type unused struct {
	value string // name of the value; "": a switch
	text  string
	given bool // not just --flag=false
}

func (u *unused) Type() string     { return u.value }
func (u *unused) String() string   { return u.text }
func (u *unused) IsBoolFlag() bool { return u.value == "" }

func (u *unused) Set(v string) error {
	u.text, u.given = v, true
	if u.value == "" {
		on, err := strconv.ParseBool(v)
		if err != nil {
			return errdefs.Invalidf("it is true or false")
		}
		u.given = on
	}
	if _, err := strconv.ParseFloat(v, 64); u.value == number && err != nil { // it would swallow an argument
		return errdefs.Invalidf("%q is not a number of seconds", v)
	}
	return nil
}

// path is the name of cmd without that of the program: "vm run".
func path(cmd *cobra.Command) string {
	_, rest, _ := strings.Cut(cmd.CommandPath(), " ")
	return rest
}

// accept adds the accepted flags to the commands that have them. The help lists them apart from those with an effect.
func (a *app) accept(root *cobra.Command) {
	add := func(fs *pflag.FlagSet, f accepted) {
		fs.AddFlag(&pflag.Flag{
			Name: f.flag, Shorthand: acceptedShort[f.flag], Usage: "no effect: " + f.reason, Value: &unused{value: f.value}, Hidden: true,
			NoOptDefVal: map[bool]string{true: "true"}[f.value == ""],
		})
	}
	var walk func(cmd *cobra.Command)
	walk = func(cmd *cobra.Command) {
		for _, f := range acceptedFlags {
			switch {
			case cmd == root && f.command == "":
				add(cmd.PersistentFlags(), f)
			case cmd != root && f.of(path(cmd)):
				add(cmd.Flags(), f)
			}
		}
		for _, c := range cmd.Commands() {
			walk(c)
		}
	}
	walk(root)
	usage := root.UsageFunc()
	root.SetUsageFunc(func(cmd *cobra.Command) error {
		if err := usage(cmd); err != nil {
			return err
		}
		return printAccepted(cmd)
	})
}

// printAccepted adds the flags that cmd accepts without effect to its help.
func printAccepted(cmd *cobra.Command) error {
	tw := tabwriter.NewWriter(cmd.OutOrStderr(), 0, 0, 3, ' ', 0)
	title := "\nAccepted without effect, for scripts of other versions:\n"
	for _, f := range acceptedFlags {
		if f.command == "" && cmd.HasParent() || f.command != "" && !f.of(path(cmd)) {
			continue
		}
		fmt.Fprintf(tw, "%s      --%s\t%s\n", title, strings.TrimSpace(f.flag+" "+f.value), f.reason)
		title = ""
	}
	return tw.Flush()
}

// noteAccepted says of each given flag without effect why it has none.
func (a *app) noteAccepted(cmd *cobra.Command) {
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if u, ok := f.Value.(*unused); ok && u.given {
			a.warn("--%s has %s", f.Name, f.Usage)
		}
	})
}

// warn prints one line for people; programs read standard output.
func (a *app) warn(format string, args ...any) {
	fmt.Fprintf(a.Stderr, "Warning: "+format+"\n", args...)
}
