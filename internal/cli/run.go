package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/nodeclient"
	"cocoonstack.io/cocoon/internal/nodejson"
	"cocoonstack.io/cocoon/internal/textui"
	"cocoonstack.io/cocoon/internal/vm"
)

const (
	maxNICs     = 8
	nameRetries = 5 // other callers may take a name first
)

// specFlags are the flags of create and run.
type specFlags struct {
	name, hostname, runAs, workdir, network, bridge   string
	uefi                                              vm.UEFI
	accel, firmware, tpm, driver, keep                string
	cpus, nics                                        int
	growCPUs                                          int // 0: the VM keeps the CPUs that it starts with
	memory, growMemory, storage                       textui.Size
	diskRate                                          diskRateFlags
	huge                                              hugePagesFlag
	env, labels, offered, publish, volumes            []string
	entrypoint                                        string
	tty, stdin, fc, paused, graphics, windows, virtio bool
	stopGrace                                         time.Duration
	pull                                              pullPolicy
	cloudInit                                         cloudInitFlags
	smbios                                            map[string]string
	storageGiven                                      func() bool
	out                                               textui.Format
}

func (f *specFlags) add(cmd *cobra.Command) {
	fs := cmd.Flags()
	f.memory, f.storage = vm.DefaultMemory, vm.DefaultStorage
	fs.StringVar(&f.name, "name", "", "name of the VM (default: cocoon-IMAGE, numbered when taken)")
	fs.IntVar(&f.cpus, "cpu", vm.DefaultCPUs, "number of virtual CPUs")
	fs.Var(&f.memory, "memory", "memory: 512M, 2G; units are powers of 1024")
	fs.Var(&f.storage, "storage", "size of the writable disk; a disk image larger than the default keeps its own")
	f.diskRate.add(fs, "no limit")
	fs.IntVar(&f.nics, "nics", 1, "number of network interfaces")
	fs.StringVar(&f.network, "network", "", "network of the interfaces (default: the node's); or one for each interface, separated by commas")
	fs.StringVar(&f.bridge, "bridge", "", "the network whose bridge is `LINK`, instead of --network")
	cmd.MarkFlagsMutuallyExclusive("network", "bridge")
	fs.StringArrayVarP(&f.publish, "publish", "p", nil, "port of the host that leads to the guest: [ADDRESS:]HOSTPORT:PORT[/PROTOCOL]; may be repeated")
	fs.StringArrayVarP(&f.volumes, "volume", "v", nil, "volume of the node: VOLUME:/PATH[:ro]; an image that boots itself gets VOLUME[:ro][:shared] as a disk, which other VMs have too if all say shared; or a folder that the node shares: /FOLDER:/PATH[:ro]; or one of an NFS server: nfs://SERVER/FOLDER:/PATH[:ro]; may be repeated")
	fs.StringArrayVarP(&f.env, "env", "e", nil, "environment variable NAME=VALUE, or NAME to pass it on; may be repeated")
	fs.StringVar(&f.entrypoint, "entrypoint", "", "program to run instead of the image's entrypoint")
	fs.StringVar(&f.hostname, "hostname", "", "host name of the guest (default: the VM's name)")
	fs.StringVarP(&f.runAs, "run-as", "u", "", "user of the main process: name, uid, user:group")
	fs.StringVarP(&f.workdir, "workdir", "w", "", "working directory of the main process")
	fs.BoolVarP(&f.stdin, "interactive", "i", false, "keep a standard input open for the main process; see vm attach")
	fs.BoolVarP(&f.tty, "tty", "t", false, "give the main process a terminal")
	fs.StringArrayVar(&f.labels, "label", nil, "label KEY=VALUE; may be repeated")
	fs.StringSliceVar(&f.offered, "offer", nil, "namespaces of the cluster of which a pod may take the VM over, and remove it")
	fs.StringVar(&f.accel, "accel", string(vm.AccelAuto), "auto, kvm or tcg")
	fs.StringVar(&f.firmware, "firmware", "", "bios or uefi, for disk images")
	fs.StringToStringVar(&f.smbios, "smbios", nil, "what the firmware tells the guest, as KEY=VALUE: "+strings.Join(smbiosKeys(), ", ")+"; separated by commas, or repeated")
	fs.BoolVar(&f.graphics, "graphics", false, "a screen, a keyboard and a mouse, for disk images; see vm vnc and vm screenshot")
	fs.StringVar(&f.driver, "driver", "", "hypervisor (default: the node's); the default stands in for cloud-hypervisor or firecracker where that cannot run")
	fs.BoolVar(&f.fc, "fc", false, "the same as --driver firecracker")
	cmd.MarkFlagsMutuallyExclusive("driver", "fc")
	f.cloudInit.add(cmd)
	fs.BoolVar(&f.paused, "paused", false, "start paused: the guest does not run before vm unpause, each time that the VM starts")
	fs.DurationVar(&f.stopGrace, "stop-grace", vm.DefaultStopGrace, "time a stop gives the guest")
	pullPolicyFlag(cmd, &f.pull, "pull", image.PullIfNotPresent, "fetch the image first: missing (when it is not here), always (when there is a newer one) or never")
	f.storageGiven = func() bool { return fs.Changed("storage") }
	textui.OutputFlag(cmd, &f.out)
	fs.SortFlags = false
	textui.CompleteWords(cmd, "accel", "auto", "kvm", "tcg")
	textui.CompleteWords(cmd, "firmware", "bios", "uefi")
	fs.StringVar(&f.tpm, "tpm", "", "a TPM 2.0, for disk images: ephemeral (empty at each start) or persistent")
	fs.Var(&f.huge, "huge-pages", "for disk images: memory of huge pages of 2Mi or 1Gi, which the node has set aside (sysctl vm.nr_hugepages)")
	fs.Lookup("huge-pages").NoOptDefVal = vm.HugePages2M.String()
	textui.CompleteWords(cmd, "huge-pages", vm.HugePages2M.String(), vm.HugePages1G.String())
	textui.CompleteWords(cmd, "tpm", string(vm.TPMEphemeral), string(vm.TPMPersistent))
	fs.BoolVar(&f.windows, "windows", false, "the guest is Windows, for disk images: it gets UEFI, Hyper-V's interface, a clock in local time, disks on SATA and interfaces of model e1000e")
	fs.BoolVar(&f.virtio, "virtio", false, "with --windows: the guest has the drivers of virtio, so its disks and interfaces are virtio")
	fs.BoolVar(&f.uefi.SecureBoot, "secure-boot", false, "with --firmware uefi: start only what is signed with Microsoft's keys")
	fs.BoolVar(&f.uefi.Persistent, "keep-uefi", false, "with --firmware uefi: keep the variables of the firmware when the VM stops")
	fs.IntVar(&f.growCPUs, "grow-cpu", 0, "to how many CPUs the running VM can grow (cocoon vm resize)")
	fs.Var(&f.growMemory, "grow-memory", "to how much memory the running VM can grow (cocoon vm resize)")
	fs.StringVar(&f.keep, "keep-firmware", "", "with --keep-uefi or --tpm persistent: what they keep outlives the VM, for the next one with its name and this key (cocoon vm firmware)")
	cmd.SetFlagErrorFunc(hintAboutDashes)
}

// hintAboutDashes adds a hint: most wrong flags of run and exec are meant for the command in the guest.
func hintAboutDashes(_ *cobra.Command, err error) error {
	if _, ok := errors.AsType[*pflag.NotExistError](err); ok {
		return errdefs.Invalidf("%w; if it is for the command in the guest, put -- before that command", err)
	}
	return errdefs.As(errdefs.InvalidArgument, err)
}

// spec creates the request. It leaves to the engine what only the engine can validate.
func (f *specFlags) spec(args []string, getenv func(string) string) (vm.Spec, error) {
	s := vm.Spec{
		Name: f.name, Image: args[0], CPUs: f.cpus, Memory: int64(f.memory), DiskRate: f.diskRate.rate(), Driver: f.driver,
		Accel: vm.Accel(f.accel), Firmware: vm.Firmware(f.firmware), Graphics: f.graphics,
		Hostname: f.hostname, Paused: f.paused, StopGrace: f.stopGrace,
		Process: vm.Process{Args: args[1:], User: f.runAs, WorkDir: f.workdir, TTY: f.tty, Stdin: f.stdin},
	}
	growth := vm.Growth{Sockets: f.growCPUs, Memory: int64(f.growMemory)}
	var topology vm.Topology
	if growth.Sockets > 0 {
		topology = vm.Topology{Sockets: f.cpus, Cores: 1, Threads: 1}
	}
	if h := (vm.Hardware{Topology: topology, Growth: growth, UEFI: f.uefi, TPM: vm.TPM(f.tpm), Keep: f.keep, HugePages: vm.HugePages(f.huge)}); !h.Usual() {
		s.Hardware = &h
	}
	if f.fc {
		s.Driver = "firecracker"
	}
	if f.storageGiven() { // otherwise the node chooses: its default, or what the image needs
		s.Storage = int64(f.storage)
	}
	if f.entrypoint != "" {
		s.Process.Entrypoint = []string{f.entrypoint}
	}
	switch { // the engine treats a zero as "not given"
	case f.cpus < 1:
		return s, errdefs.Invalidf("--cpu %d: a VM needs at least one CPU", f.cpus)
	case f.nics < 0 || f.nics > maxNICs:
		return s, errdefs.Invalidf("--nics %d: between 0 and %d interfaces are possible", f.nics, maxNICs)
	case strings.Contains(f.network, ",") && (f.nics != 1 || strings.Count(f.network, ",") >= maxNICs):
		return s, errdefs.Invalidf("--network %s: leave out --nics, and name at most %d networks: each has one interface", f.network, maxNICs)
	case f.stopGrace <= 0:
		return s, errdefs.Invalidf("--stop-grace %s: it must be more than 0", f.stopGrace)
	}
	var err error
	if s.SMBIOS, err = parseSMBIOS(f.smbios); err != nil {
		return s, err
	}
	if s.CloudInit, err = f.cloudInit.value(); err != nil {
		return s, err
	}
	if s.Process.Env, err = parseEnv(f.env, getenv); err != nil {
		return s, err
	}
	if s.Volumes, s.Mounts, err = parseVolumes(f.volumes); err != nil {
		return s, err
	}
	s.Image, s.Volumes = bootVolume(s.Image, s.Volumes)
	s.NICs, s.Offered = nicSpecs(f.nics, strings.Split(f.network, ",")...), f.offered
	switch {
	case f.virtio && !f.windows:
		return s, errdefs.Invalidf("--virtio is for Windows, and every other guest has virtio; leave it out, or add --windows")
	case f.virtio:
		s = s.AsWindows().OnVirtio()
	case f.windows:
		s = s.AsWindows()
	}
	ports, err := parsePorts(f.publish)
	switch {
	case err != nil:
		return s, err
	case len(ports) > 0 && f.nics == 0:
		return s, errdefs.Invalidf("--publish needs a network interface; leave out --nics 0")
	case len(ports) > 0:
		s.NICs[0].Ports = ports
	}
	s.Labels, err = parseLabels(f.labels)
	return s, err
}

// networkOn returns the network whose bridge is link. A VM must not get to another network than the one asked for.
func networkOn(ctx context.Context, c *nodeclient.Client, link string) (string, error) {
	i, err := c.Info(ctx)
	if err != nil {
		return "", err
	}
	for _, n := range i.NetworkDetails {
		if n.Bridge == link {
			return n.Name, nil
		}
	}
	return "", errdefs.NotFoundf("no network of the node has the bridge %s; `cocoon net status` shows all, `cocoon net adopt %s` how to add it", link, link)
}

func parseLabels(list []string) (map[string]string, error) {
	var labels map[string]string
	for _, l := range list {
		k, v, ok := strings.Cut(l, "=")
		if !ok || k == "" {
			return nil, errdefs.Invalidf("--label %q is not KEY=VALUE", l)
		}
		if labels == nil {
			labels = map[string]string{}
		}
		labels[k] = v
	}
	return labels, nil
}

func parseEnv(list []string, getenv func(string) string) ([]vm.EnvVar, error) {
	var env []vm.EnvVar
	for _, e := range list {
		name, value, ok := strings.Cut(e, "=")
		if name == "" {
			return nil, errdefs.Invalidf("--env %q is not NAME=VALUE", e)
		}
		if !ok {
			value = getenv(name)
		}
		env = append(env, vm.EnvVar{Name: name, Value: value})
	}
	return env, nil
}

func (a *app) vmCreateCommand() *cobra.Command {
	var f specFlags
	cmd := &cobra.Command{
		Use:     "create IMAGE [-- CMD...]",
		Short:   "Prepare a VM without starting it",
		Long:    "Prepare a VM without starting it. CMD replaces the command of a container image.",
		Example: "  cocoon vm create --name web --memory 512M demo\n  cocoon vm start web",
		Args:    cobra.MinimumNArgs(1), ValidArgsFunction: a.completeImages,
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			r, err := a.make(ctx, c, &f, args, c.Create)
			return a.printVM(r, f.out, err)
		}),
	}
	f.add(cmd)
	return cmd
}

func (a *app) vmDebugCommand() *cobra.Command {
	var f specFlags
	cmd := &cobra.Command{
		Use:   "debug IMAGE [-- CMD...]",
		Short: "Print what run would request, and create nothing",
		Long: `Print what run would request, as the JSON that "cocoon vm run --spec" takes. Nothing is created or fetched.

There is no command line of the hypervisor to print: cocoond passes it files and sockets that it has opened, not paths.`,
		Example: "  cocoon vm debug --name web demo > web.json && cocoon vm run --spec web.json",
		Args:    cobra.MinimumNArgs(1), ValidArgsFunction: a.completeImages,
		RunE: a.calling(func(ctx context.Context, c *nodeclient.Client, args []string) error {
			s, err := a.request(ctx, c, &f, args)
			if err != nil {
				return err
			}
			return textui.PrintJSON(a.Stdout, nodejson.FromSpec(s))
		}),
	}
	f.add(cmd)
	return cmd
}

func (a *app) vmRunCommand() *cobra.Command {
	var f specFlags
	var wait waitFlags
	var spec string
	cmd := &cobra.Command{
		Use:   "run IMAGE [-- CMD...]",
		Short: "Create a VM and start it",
		Long: `Create a VM and start it. CMD replaces the command of a container image. An image that is not here is fetched first,
from where its name says; see "cocoon image pull --help". With volume://VOLUME instead of IMAGE the guest boots from a volume,
which holds a disk that boots itself, and keeps what it writes there.

It returns when the guest agent answers, or the VM has ended already. A VM of a disk image has no agent of ours: for it
run returns when the machine is on.`,
		Example: `  cocoon vm run demo
  cocoon vm run --name web --cpu 1 --memory 256M -e MODE=test demo
  cocoon vm run --ssh-key ~/.ssh/id_ed25519.pub --user-data setup.yaml debian-12
  cocoon vm run --name once demo -- sh -c 'echo hello'; cocoon vm logs once
  cocoon volume import system disk.raw && cocoon vm run --name pet volume://system
  cocoon vm run -o json demo | jq -r .id`,
		Args: func(cmd *cobra.Command, args []string) error {
			if spec != "" {
				return cobra.NoArgs(cmd, args)
			}
			return cobra.MinimumNArgs(1)(cmd, args)
		},
		ValidArgsFunction: a.completeImages,
		RunE: func(cmd *cobra.Command, args []string) error {
			if spec != "" {
				return a.runSpec(cmd.Context(), spec, &f, &wait)
			}
			return a.withClient(func(c *nodeclient.Client) error {
				r, err := a.make(cmd.Context(), c, &f, args, c.Launch)
				if err != nil {
					return err
				}
				r, err = wait.settle(cmd.Context(), a, c, r)
				return a.printVM(r, f.out, err)
			})
		},
	}
	f.add(cmd)
	wait.add(cmd)
	cmd.Flags().StringVar(&spec, "spec", "", "JSON `FILE` with the whole specification, instead of IMAGE and the other flags; - is standard input")
	return cmd
}

// make calls op with the spec of the flags.
func (a *app) make(ctx context.Context, c *nodeclient.Client, f *specFlags, args []string, op func(context.Context, vm.Spec) (vm.Record, error)) (vm.Record, error) {
	s, err := a.request(ctx, c, f, args)
	if err != nil {
		return vm.Record{}, err
	}
	if s, err = a.provide(ctx, c, s, f); err != nil {
		return vm.Record{}, err
	}
	r, err := a.named(ctx, c, f, s, op)
	if err == nil {
		a.noteLogin(&f.cloudInit, r)
		a.noteStandIn(ctx, c, r)
		if f.firmware != "" && r.ImageType == vm.ImageOCI {
			a.warn("--firmware has no effect: %s is a container image, whose kernel is loaded without firmware", textui.Cell(r.Spec.Image))
		}
		if f.graphics && r.ImageType == vm.ImageOCI {
			a.warn("--graphics has no effect: %s is a container image, whose kernel shows nothing on a screen", textui.Cell(r.Spec.Image))
		}
		if f.tpm != "" && r.ImageType == vm.ImageOCI {
			a.warn("--tpm has no effect: %s is a container image, whose kernel knows one machine", textui.Cell(r.Spec.Image))
		}
		if f.huge > 0 && r.ImageType == vm.ImageOCI {
			a.warn("--huge-pages has no effect: %s is a container image, whose memory its clones share", textui.Cell(r.Spec.Image))
		}
		if f.uefi != (vm.UEFI{}) && r.ImageType == vm.ImageOCI {
			a.warn("--secure-boot and --keep-uefi have no effect: %s is a container image, whose kernel is loaded without firmware", textui.Cell(r.Spec.Image))
		}
	}
	return r, err
}

// noteStandIn says that r runs in another hypervisor than the one that was asked for, and why.
func (a *app) noteStandIn(ctx context.Context, c *nodeclient.Client, r vm.Record) {
	want := r.Spec.Driver
	if want == "" || r.Driver == "" || r.Driver == want {
		return
	}
	why := ""
	if i, err := c.Info(ctx); err == nil {
		for _, d := range i.Drivers {
			if d.Name == want && d.Error != "" {
				why = ": " + textui.Cell(d.Error)
			}
		}
	}
	a.warn("VM %s runs in %s, which stands in for %s%s", r.Spec.Name, r.Driver, want, why)
}

// named calls op with s, under a generated name if none was given.
func (a *app) named(ctx context.Context, c *nodeclient.Client, f *specFlags, s vm.Spec, op func(context.Context, vm.Spec) (vm.Record, error)) (vm.Record, error) {
	if f.name != "" {
		return op(ctx, s)
	}
	for try := 0; ; try++ {
		all, err := c.List(ctx)
		if err != nil {
			return vm.Record{}, err
		}
		s.Name = freeName(s.Image, all)
		r, err := op(ctx, s)
		if errdefs.IsAlreadyExists(err) && try < nameRetries {
			continue // another caller took it meanwhile
		}
		return r, err
	}
}

// request creates the spec of the flags and reports a mistake in it before a useless transfer. A name that was not given
// is only a proposal.
func (a *app) request(ctx context.Context, c *nodeclient.Client, f *specFlags, args []string) (vm.Spec, error) {
	if f.bridge != "" {
		var err error
		if f.network, err = networkOn(ctx, c, f.bridge); err != nil {
			return vm.Spec{}, err
		}
	}
	s, err := f.spec(args, a.Getenv)
	if err != nil {
		return s, err
	}
	s.Name = cmp.Or(s.Name, freeName(s.Image, nil))
	return s, s.Clone().Default().Validate()
}

// provide fetches the image of s as the flags say.
func (a *app) provide(ctx context.Context, c *nodeclient.Client, s vm.Spec, f *specFlags) (vm.Spec, error) {
	if _, ok := vm.BootVolume(s.Image); ok || image.PullPolicy(f.pull) == image.PullNever {
		return s, nil
	}
	img, err := a.pull(ctx, c, image.PullRequest{Name: s.Image, Policy: image.PullPolicy(f.pull)}, f.out == textui.FormatJSON)
	if err == nil && strings.Contains(s.Image, "://") { // may hold a password, which must not be in a record
		s.Image = img.Name
	}
	return s, err
}

// freeName returns cocoon-<image>, or with -2, -3… if that is taken.
func freeName(img string, taken []vm.Record) string {
	base := "cocoon-" + imageWord(img)
	used := make(map[string]bool, len(taken))
	for _, r := range taken {
		used[r.Spec.Name] = true
	}
	for name, n := cut(base, vm.MaxNameLength), 2; ; n++ {
		if !used[name] {
			return name
		}
		suffix := fmt.Sprintf("-%d", n)
		name = cut(base, vm.MaxNameLength-len(suffix)) + suffix
	}
}

// imageWord returns the last part of an image's name without tag and digest, in characters that a VM's name may have.
func imageWord(image string) string {
	if _, rest, ok := strings.Cut(image, "://"); ok { // a web address
		image, _, _ = strings.Cut(rest[strings.LastIndexByte(rest, '@')+1:], "?")
	}
	image, _, _ = strings.Cut(image, "@")
	image = image[strings.LastIndexByte(image, '/')+1:]
	image, _, _ = strings.Cut(image, ":")
	image = strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '.' || r == '_' {
			return r
		}
		return '-'
	}, image)
	return strings.Trim(image, "-._")
}

func cut(s string, n int) string { return strings.TrimRight(s[:min(n, len(s))], "-._") }
