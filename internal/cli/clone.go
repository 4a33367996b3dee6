package cli

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/postclone"
	"cocoonstack.io/cocoon/internal/textui"
	"cocoonstack.io/cocoon/internal/vm"
)

// cloneFlags are the flags of clone. Zero values mean the snapshot's own.
type cloneFlags struct {
	vm.CloneSpec
	memory, storage textui.Size
	diskRate        diskRateFlags
	nics            int
	network, bridge string
	labels          []string
	pull            bool
	authFile        string
	wait            waitFlags
	out             textui.Format
}

func (a *app) vmCloneCommand() *cobra.Command {
	var f cloneFlags
	cmd := &cobra.Command{
		Use:   "clone SNAPSHOT",
		Short: "Make a VM that goes on from a snapshot",
		Long: `Make a VM that goes on from a snapshot, in the time of a memory map, or with --from-dir from a folder that "cocoon
snapshot export --to-dir" made. CPU, memory and disks are those of the snapshot; its disk may be larger.

Before anybody can reach it, the agent in the guest has given it an identity of its own: addresses, host name, machine
id, random numbers, clock. clone returns then. In a guest without the agent nobody can do that: clone returns when its
CPUs run, and says what remains to be done.` + snapshotHelp,
		Example: `  cocoon vm clone --name web-2 warm
  cocoon vm clone --pull --storage 40G --ssh-host-keys warm
  cocoon vm clone --from-dir /srv/shared/warm --name web-3
  for i in $(seq 16); do cocoon vm clone --name web-$i warm & done; wait`,
		Args: cobra.MaximumNArgs(1), ValidArgsFunction: inTurn(a.completeSnapshots),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.withClient(func(c *nodeclient.Client) error { return a.clone(cmd, c, &f, args) })
		},
	}
	fs := cmd.Flags()
	fs.StringVar(&f.Name, "name", "", "name of the VM (default: cocoon-clone-ID)")
	fs.IntVar(&f.CPUs, "cpu", 0, "number of virtual CPUs; a clone that resumes has its snapshot's, see --cold")
	fs.Var(&f.memory, "memory", "memory; a clone that resumes has its snapshot's, see --cold")
	fs.Var(&f.storage, "storage", "size of the writable disk, if more than the snapshot's: 40G")
	f.diskRate.add(fs, "the snapshot's")
	fs.IntVar(&f.nics, "nics", 0, "number of network interfaces; another one than the snapshot's only with --cold")
	fs.StringVar(&f.network, "network", "", "network of the interfaces (default: the node's)")
	fs.StringVar(&f.bridge, "bridge", "", "the network whose bridge is `LINK`, instead of --network")
	cmd.MarkFlagsMutuallyExclusive("network", "bridge")
	fs.StringVar(&f.Hostname, "hostname", "", "host name of the guest (default: the VM's name)")
	fs.BoolVar(&f.SSHHostKeys, "ssh-host-keys", false, "give the guest SSH host keys of its own")
	fs.StringArrayVar(&f.labels, "label", nil, "label KEY=VALUE; may be repeated")
	fs.StringVar(&f.FromDir, "from-dir", "", "`DIR` of this machine with an exported snapshot")
	fs.BoolVar(&f.pull, "pull", false, "fetch the snapshot's image, by its digest, when it is not here")
	fs.StringVar(&f.authFile, "auth-file", "", "with --pull: docker config.json `FILE` with credentials for registries")
	fs.BoolVar(&f.Cold, "cold", false, "boot from the snapshot's disks instead of going on from its memory")
	fs.DurationVar(&f.StopGrace, "stop-grace", 0, "time a stop gives the guest (default: the snapshot's)")
	f.wait.add(cmd)
	textui.OutputFlag(cmd, &f.out)
	for _, name := range []string{"memory", "storage"} {
		fs.Lookup(name).DefValue = ""
	}
	fs.SortFlags = false
	return cmd
}

func (a *app) clone(cmd *cobra.Command, c *nodeclient.Client, f *cloneFlags, args []string) error {
	ctx := cmd.Context()
	if f.bridge != "" {
		var err error
		if f.network, err = networkOn(ctx, c, f.bridge); err != nil {
			return err
		}
	}
	s, err := f.spec(args, cmd.Flags().Changed)
	if err != nil {
		return err
	}
	var auth []image.RegistryAuth
	if f.authFile != "" {
		if auth, err = readAuth(f.authFile); err != nil {
			return err
		}
	}
	stop := textui.Waiting(ctx, a.Stderr, "cloning "+argument(args, 0, s.FromDir))
	var r vm.Record
	if f.pull {
		r, err = c.CloneWithImage(ctx, s, auth)
	} else {
		r, err = c.Clone(ctx, s)
	}
	stop()
	if err != nil {
		return err
	}
	a.noteSize(s, r)
	if r, err = f.wait.settle(ctx, a, c, r); err != nil {
		return err
	}
	a.noteStranger(r)
	return a.printVM(r, f.out, nil)
}

// noteSize says which sizes that s asks for the resumed guest of r does not have. Programs of others request the sizes of a pod
// for each clone.
func (a *app) noteSize(s vm.CloneSpec, r vm.Record) {
	if s.CPUs != 0 && s.CPUs != r.Spec.CPUs {
		a.warn("--cpu %d has no effect: the guest resumes with the %d CPUs of its snapshot; --cold changes that", s.CPUs, r.Spec.CPUs)
	}
	if s.Memory != 0 && s.Memory != r.Spec.Memory {
		a.warn("--memory %s has no effect: the guest resumes with the %s of its snapshot; --cold changes that", textui.FormatSize(s.Memory), textui.FormatSize(r.Spec.Memory))
	}
}

// spec creates the request. It leaves to the engine what only the engine can validate.
func (f *cloneFlags) spec(args []string, changed func(string) bool) (vm.CloneSpec, error) {
	s := f.CloneSpec
	s.Memory, s.Storage, s.DiskRate = int64(f.memory), int64(f.storage), f.diskRate.rate()
	switch {
	case len(args) == 0 && s.FromDir == "":
		return s, errdefs.Invalidf("a clone needs a snapshot, or --from-dir with a folder that holds one")
	case len(args) > 0 && s.FromDir != "":
		return s, errdefs.Invalidf("a clone is of a snapshot or of --from-dir, not of both")
	case changed("cpu") && s.CPUs < 0:
		return s, errdefs.Invalidf("--cpu %d: a VM needs at least one CPU", s.CPUs)
	case f.nics < 0 || f.nics > maxNICs:
		return s, errdefs.Invalidf("--nics %d: between 0 and %d interfaces are possible", f.nics, maxNICs)
	case changed("stop-grace") && s.StopGrace <= 0:
		return s, errdefs.Invalidf("--stop-grace %s: it must be more than 0", s.StopGrace)
	case f.authFile != "" && !f.pull:
		return s, errdefs.Invalidf("--auth-file is for --pull, which is not given")
	}
	if len(args) > 0 {
		s.Snapshot = args[0]
	}
	if s.FromDir != "" {
		abs, err := filepath.Abs(s.FromDir)
		if err != nil {
			return s, errdefs.Invalidf("--from-dir %s: %w", s.FromDir, err)
		}
		s.FromDir = abs
	}
	s.NICs = nicSpecs(f.nics, f.network)
	if f.nics == 0 && f.network != "" {
		s.NICs = nicSpecs(1, f.network)
		s.Keep.NICs = true
	}
	s.Keep.Size = s.CPUs != 0 || s.Memory != 0
	var err error
	s.Labels, err = parseLabels(f.labels)
	return s, err
}

// nicSpecs returns n interfaces on each of networks.
func nicSpecs(n int, networks ...string) []vm.NICSpec {
	var nics []vm.NICSpec
	for _, network := range networks {
		nics = append(nics, slices.Repeat([]vm.NICSpec{{Network: strings.TrimSpace(network)}}, n)...)
	}
	return nics
}

// argument returns the i-th of args, or other if it is not given.
func argument(args []string, i int, other string) string {
	if i < len(args) {
		return args[i]
	}
	return other
}

// noteStranger prints what remains to be done in a resumed guest that could not be given its identity.
func (a *app) noteStranger(r vm.Record) {
	if r.State != vm.StateRunning || r.Resume == nil || !r.Cloned || r.ImageType != vm.ImageDisk {
		return
	}
	facts := postclone.Facts{Hypervisor: r.Driver, ImageType: r.ImageType, Image: r.Spec.Image, Windows: r.Spec.IsWindows()}
	for i, nic := range r.NICs {
		facts.StaticNIC = facts.StaticNIC || nic.IP != "" && !nic.DHCP
		facts.FixedMAC = facts.FixedMAC || i < len(r.Resume.MACs) && !strings.EqualFold(r.Resume.MACs[i], nic.MAC)
	}
	commands, err := postclone.Commands(postclone.Classify(facts), postclone.Clone{
		ID: r.ID, Hostname: cmp.Or(r.Spec.Hostname, r.Spec.Name), NICs: vm.GuestNICs(r.NICs), MACs: r.Resume.MACs, MachineID: r.Resume.MachineID,
	})
	if err != nil || commands == "" {
		return // then the guest's own network has to give it its identity
	}
	fmt.Fprintf(a.Stderr, `Note: %[1]s is being told who it is by the qemu-guest-agent in it (agent_ready in cocoon vm inspect says when it has been).
Where none answers, its guest takes itself for the source of the snapshot until root runs this in it (cocoon vm console %[1]s):

%[2]s`, textui.Cell(r.Spec.Name), commands)
}

func (a *app) vmHibernateCommand() *cobra.Command {
	var out textui.Format
	var name string
	cmd := &cobra.Command{
		Use: "hibernate REF...", Short: "Save VMs and end their processes, until they are woken",
		Long: `Save VMs and end their processes, until they are woken. A hibernated VM costs disk only and keeps its name, MAC and IP.
Nothing is ended before all of it is durable; a VM that cannot be saved runs on.` + refHelp,
		Example: "  cocoon vm hibernate web\n  cocoon vm wake web",
		Args:    cobra.MinimumNArgs(1), ValidArgsFunction: a.completeVMs,
	}
	cmd.Flags().StringVar(&name, "snapshot", "", "name of the snapshot that it is kept in (default: hibernate-ID)")
	textui.OutputFlag(cmd, &out)
	cmd.RunE = func(cmd *cobra.Command, refs []string) error {
		if name != "" && len(refs) > 1 {
			return errdefs.Invalidf("--snapshot names one snapshot, and these are %d VMs", len(refs))
		}
		return a.eachVM(&out, func(c *nodeclient.Client, ctx context.Context, ref string) (vm.Record, error) {
			stop := textui.Waiting(ctx, a.Stderr, "saving "+ref)
			defer stop()
			return c.Hibernate(ctx, ref, name)
		})(cmd, refs)
	}
	return cmd
}

func (a *app) vmWakeCommand() *cobra.Command {
	var out textui.Format
	var wait waitFlags
	cmd := &cobra.Command{
		Use: "wake REF...", Short: "Have hibernated VMs go on where they stopped",
		Long: "Have hibernated VMs go on where they stopped, with the same name, MAC and IP. One that runs is left alone." + refHelp,
		Args: cobra.MinimumNArgs(1), ValidArgsFunction: a.completeVMs,
	}
	wait.add(cmd)
	textui.OutputFlag(cmd, &out)
	cmd.RunE = a.eachVM(&out, func(c *nodeclient.Client, ctx context.Context, ref string) (vm.Record, error) {
		stop := textui.Waiting(ctx, a.Stderr, "waking "+ref)
		r, err := c.Wake(ctx, ref)
		stop()
		if err != nil {
			return r, err
		}
		return wait.settle(ctx, a, c, r)
	})
	return cmd
}

func (a *app) vmRestoreCommand() *cobra.Command {
	var out textui.Format
	var wait waitFlags
	cmd := &cobra.Command{
		Use: "restore REF SNAPSHOT", Short: "Have a VM go back to a snapshot that was taken of it",
		Long: `Have a VM go back to a snapshot that was taken of it. What happened in it since is lost. It may be running, stopped or
hibernated; afterwards it runs. A snapshot of another VM is for "cocoon vm clone".` + refHelp + snapshotHelp,
		Example: "  cocoon snapshot save --name before web\n  cocoon vm restore web before",
		Args:    cobra.ExactArgs(2), ValidArgsFunction: inTurn(a.completeVMs, a.completeSnapshots),
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			stop := textui.Waiting(ctx, a.Stderr, "restoring "+args[0])
			r, err := c.Restore(ctx, args[0], args[1])
			stop()
			if err != nil {
				return err
			}
			r, err = wait.settle(ctx, a, c, r)
			return a.printVM(r, out, err)
		}),
	}
	wait.add(cmd)
	textui.OutputFlag(cmd, &out)
	return cmd
}
