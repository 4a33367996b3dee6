package tenancy

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
)

// Messages of nodes.
const (
	notSupported = "PodNotSupported"
	createError  = "CreateContainerError"
	leftBehind   = "VMLeftBehind"
	pullBackOff  = "ImagePullBackOff"

	another     = "is the name of a VM of another namespace"
	noSnapshot  = "has no snapshot"
	notItsOwn   = "none of this name belongs to namespace dev"
	notOfIt     = ":latest in the registry does not belong to dev"
	doesNotSay  = "does not name its owner"
	notListed   = "the operator lists"
	operatorsIs = "the operator's networks, images and folders are no namespace's"
)

func boots() Cell          { return Cell{Node: Outcome{State: Boots}} }
func goesOn(of Whose) Cell { return Cell{Node: Outcome{State: GoesOn, Of: of}} }
func stands() Cell         { return Cell{Node: Outcome{State: Stands}} }
func sleeps() Cell         { return Cell{Node: Outcome{State: Sleeps}} }
func none(why string) Cell { return Cell{None: why} }
func waits(reason, says string) Cell {
	return Cell{Node: Outcome{State: Waits, Reason: reason, Says: says}}
}

func refuses(says string) Cell { return waits(notSupported, says) }

// refused is a pod that admission refuses with the same message as a node.
func refused(says string) Cell {
	c := refuses(says)
	c.Refused = says
	return c
}

// foreign is the outcome of a pod that names a VM of another namespace.
func foreign() Cell { return refused(another) }

// closed is the outcome for a folder that no pod may be cloned from.
func closed() Cell {
	c := waits(createError, "may not clone from the folder")
	c.Refused = notListed
	return c
}

// later is c with the outcome after a restart of the node.
func later(c Cell, then Cell) Cell {
	c.Later = &then.Node
	return c
}

func all(c Cell) [4]Cell { return [4]Cell{c, c, c, c} }

// ask builds a set of annotations.
func ask(pairs ...string) map[string]string {
	m := map[string]string{}
	for i := 0; i < len(pairs); i += 2 {
		m[pairs[i]] = pairs[i+1]
	}
	return m
}

func clone(image string) map[string]string {
	return ask(contract.KeyMode, "clone", contract.KeyImage, image)
}

func run(pairs ...string) map[string]string { return ask(append(pairs, contract.KeyMode, "run")...) }

// managed is a pod whose VM the node manages and does not save.
func managed(pairs ...string) map[string]string {
	return ask(append(pairs, contract.KeyManaged, "true", contract.KeySnapshotPolicy, "never")...)
}

var (
	// notThatOne is the outcome of a pod that names the VM to fork with the id of another VM.
	notThatOne = waits(createError, "is not in the registry yet")

	longPod = strings.Repeat("long-", 12) + "name"

	// ofNobody is the reason for an empty column.
	ofNobody = none("what has no VM yet has no owner")
	unmade   = none("earlier releases made them for pods alone")
)

// rows are the table: each way to name something, and the outcome for a pod that names what belongs to itself, to another
// namespace, to the operator, and what the operator shares.
var rows = append([]Row{
	// Names of VMs: adoption and creation.
	{
		Name: "name of a pod's VM", Ask: run(contract.KeyName, "{nap}"), Forms: []string{"VMName", "MayName", "plainPrefix"},
		Cells: [4]Cell{waits(createError, "is taken by pod dev/nap"), foreign(), boots(), none("the VM made by hand is one")},
	},
	{
		Name: "name of a VM made by hand", Ask: run(contract.KeyName, "{plain:hand}"),
		Cells: [4]Cell{goesOn(Own), boots(), boots(), goesOn(Public)}, Takes: []string{"pub-hand"},
	},
	{
		Name: "name that nobody has", Ask: run(contract.KeyName, "{new}"),
		Cells: [4]Cell{boots(), foreign(), ofNobody, ofNobody},
	},
	{
		Name: "long name", Ask: run(contract.KeyName, "{"+longPod+"}"), Forms: []string{"hashedPrefix"},
		Cells: [4]Cell{boots(), foreign(), ofNobody, ofNobody},
	},
	{
		Name: "name with its namespace", Ask: run(contract.KeyName, "{ns}/{nap}"), Cells: all(refused(contract.KeyName)),
	},
	{
		Name: "id as a name", Ask: run(contract.KeyName, "{id:nap}"), Cells: all(boots()),
	},
	{
		Name: "short id as a name", Ask: run(contract.KeyName, "{short:nap}"), Quick: alike, Cells: all(boots()),
	},
	{ // pod dev/eu-run and pod dev-eu/run of an earlier release have the same name
		Name: "name that an older VM has", Ask: run(contract.KeyName, "vk-dev-eu-run"), Forms: []string{"OldVMName", "CanonicalVMName", "Aliases", "dashedPrefix"},
		Cells: [4]Cell{unmade, boots(), unmade, unmade}, Quick: earlier,
	},
	{
		Name: "name of its own", Ask: run(), Pods: map[Whose]string{Own: "left", Foreign: "eu-left", Operators: "made", Public: "offered"},
		Cells: [4]Cell{waits(leftBehind, "orphan policy"), boots(), boots(), goesOn(Public)}, Takes: []string{"vk-dev-offered"}, Quick: earlier,
	},

	// Snapshots by the forms of their names.
	{
		Name: "snapshot", Ask: clone("{saved}"), Forms: []string{"SnapshotRef.Local", "SnapshotRef.Locals", "LocalSnapshotRef", "ParseSnapshotRef"},
		Cells: [4]Cell{goesOn(Own), foreign(), waits(createError, noSnapshot), goesOn(Public)},
	},
	{
		Name: "snapshot by its tag", Ask: clone("{saved}:latest"), Forms: []string{"DefaultSnapshotTag", "SnapshotRef.String"},
		Cells: [4]Cell{goesOn(Own), foreign(), waits(createError, noSnapshot), goesOn(Public)},
	},
	{
		Name: "snapshot as the container's image", Ask: ask(contract.KeyMode, "clone"), Image: "{saved}",
		Cells: [4]Cell{goesOn(Own), foreign(), waits(createError, noSnapshot), goesOn(Public)},
	},
	{
		Name: "snapshot without a mode", Ask: managed(contract.KeyImage, "{saved}"),
		Cells: [4]Cell{goesOn(Own), foreign(), waits(createError, noSnapshot), goesOn(Public)},
	},
	{
		Name: "state of a VM that sleeps here", Ask: clone("{nap}:hibernate"), Forms: []string{"HibernateSnapshotTag", "hibernateName"},
		Cells: [4]Cell{goesOn(Own), foreign(), waits(createError, noSnapshot), waits(createError, noSnapshot)},
	},
	{
		Name: "state of a VM that sleeps elsewhere", Ask: clone("{gone}:hibernate"),
		Cells: [4]Cell{goesOn(Own), foreign(), waits(createError, noSnapshot), waits(createError, noSnapshot)},
	},
	{
		Name: "state that a node fetched", Ask: clone("{nap}-hibernate-import"), Forms: []string{"importName"},
		Cells: [4]Cell{none("it is there for a moment"), foreign(), waits(createError, noSnapshot), none("it is there for a moment")},
	},
	{
		Name: "state for forks in the registry", Ask: clone("{db}:fork"), Forms: []string{"ForkSnapshotTag"},
		Cells: [4]Cell{goesOn(Own), foreign(), waits(createError, noSnapshot), waits(createError, noSnapshot)},
	},
	{
		Name: "state for forks here", Ask: clone("fork-{db}"), Forms: []string{"forkName"},
		Cells: [4]Cell{goesOn(Own), waits(createError, noSnapshot), waits(createError, noSnapshot), goesOn(Public)},
	},
	{
		Name: "repository", Ask: clone("app:1"), Forms: []string{"Repository"},
		Cells: [4]Cell{goesOn(Own), none("it has no other name"), none("it has no other name"), none("it has no other name")},
	},
	{
		Name: "repository with what is another's", Ask: clone("stray:1"),
		Cells: [4]Cell{none("the repository is one"), waits(createError, notItsOwn), none("what the operator puts there is the namespace's"), none("what the operator puts there is the namespace's")},
	},
	{
		Name: "path of a repository", Ask: clone("{ns}/app:1"),
		Cells: [4]Cell{waits(createError, noSnapshot), waits(createError, noSnapshot), waits(createError, noSnapshot), goesOn(Public)},
	},
	{
		Name: "path fetched anew", Ask: with(clone("{ns}/app:1"), contract.KeyForcePull, "true"),
		Cells: [4]Cell{waits(createError, noSnapshot), waits(createError, noSnapshot), waits(createError, noSnapshot), goesOn(Public)},
	},
	{
		Name: "path of a VM", Ask: clone("{ns}/{saved}"),
		Cells: [4]Cell{waits(createError, noSnapshot), foreign(), waits(createError, noSnapshot), goesOn(Public)},
	},
	{
		Name: "path with dots", Ask: clone("a/../../{ns}/app:1"), Cells: all(refuses("is not a snapshot's name")),
	},
	{
		Name: "path as a node keeps it", Ask: clone("{ns}___app:1"), Cells: all(refuses("is not a snapshot's name")),
	},
	{
		Name: "snapshot by digest", Ask: clone("{saved}@sha256:" + strings.Repeat("0", 64)), Cells: all(refuses("names a digest")),
	},
	{
		Name: "snapshot of a host", Ask: clone("127.0.0.1:5000/{ns}/app:1"), Cells: all(refuses("names a host")),
	},
	{
		Name: "snapshot of another node", Ask: clone("cocoon://127.0.0.1:1/{saved}"), Cells: all(refuses("is a URL")),
	},
	{
		Name: "snapshot by id", Ask: clone("{snapshot:fork}"), Cells: all(waits(createError, noSnapshot)),
	},
	{
		Name: "snapshot by short id", Ask: clone("{shortsnapshot:fork}"), Cells: all(waits(createError, noSnapshot)),
	},
	{
		Name: "snapshot of an earlier release", Ask: clone("{flat}"), Forms: []string{"OldRepository"}, Quick: earlier,
		Cells: [4]Cell{goesOn(Operators), foreign(), waits(createError, noSnapshot), goesOn(Operators)}, // the operator's push
	},
	{
		Name: "ambiguous snapshot of an earlier release", Ask: clone("vk-dev-eu-flat"), Quick: earlier,
		Cells: [4]Cell{unmade, waits(createError, notOfIt), unmade, unmade},
	},
	{
		Name: "snapshot that does not name its owner", Ask: clone("vk-dev-bare"), Quick: earlier,
		Cells: [4]Cell{unmade, unmade, waits(createError, doesNotSay), unmade},
	},

	// Forks.
	{
		Name: "fork", Ask: ask(contract.KeyForkFrom, "{db}"),
		Cells: [4]Cell{goesOn(Own), foreign(), waits(createError, noSnapshot), goesOn(Public)},
	},
	{
		Name: "fork by its namespace", Ask: ask(contract.KeyForkFrom, "{ns}/{db}"), Cells: all(refuses(contract.KeyForkFrom)),
	},
	{
		Name: "fork by id", Ask: ask(contract.KeyForkFrom, "{id:db}"), Cells: all(waits(createError, noSnapshot)),
	},
	{
		Name: "fork of a VM that is away", Ask: ask(contract.KeyForkFrom, "{saved}"),
		Cells: [4]Cell{goesOn(Own), foreign(), waits(createError, noSnapshot), goesOn(Public)},
	},
	{
		Name: "fork of an older VM", Ask: ask(contract.KeyForkFrom, "vk-dev-eu-main"), Quick: earlier,
		Cells: [4]Cell{unmade, waits(createError, noSnapshot), unmade, unmade},
	},
	{
		Name: "fork of the VM with that id", Ask: ask(contract.KeyForkFrom, "vk-dev-far-{ns}", contract.KeyForkFromID, "{id:db}"),
		Cells: [4]Cell{goesOn(Own), notThatOne, notThatOne, notThatOne},
	},

	// Folders of the node.
	{
		Name: "folder of the node's own", Ask: managed(contract.KeyCloneFromDir, "{store:fork}"), Cells: all(closed()),
	},
	{
		Name: "folder", Ask: managed(contract.KeyCloneFromDir, "{dir:fork}"),
		Cells: [4]Cell{goesOn(Own), waits(createError, "no snapshot of namespace dev"), closed(), goesOn(Public)},
	},
	{
		Name: "folder by a link", Ask: managed(contract.KeyCloneFromDir, "{link:fork}"), Cells: all(waits(createError, "may not clone from the folder")),
	},

	// Hibernation.
	{
		Name: "restored", Ask: managed(contract.KeyName, "{asleep}", contract.KeyRestoreFromHibernate, "true"),
		Cells: [4]Cell{goesOn(Own), foreign(), waits(createError, doesNotSay), waits(createError, doesNotSay)},
	},
	{
		Name: "restored by its own name", Ask: managed(contract.KeyRestoreFromHibernate, "true"), Quick: earlier,
		Pods:  map[Whose]string{Own: "asleep-2", Foreign: "eu-asleep", Operators: "bare"},
		Cells: [4]Cell{goesOn(Own), waits(createError, "the registry has no hibernated state of it"), waits(createError, doesNotSay), none("the states of VMs are nobody's to share")},
	},
	{
		Name: "managed by its own name", Ask: managed(contract.KeyMode, "run"), Quick: earlier,
		Pods:  map[Whose]string{Own: "asleep-3", Foreign: "eu-asleep-2", Operators: "bare-2"},
		Cells: [4]Cell{goesOn(Own), boots(), waits(createError, doesNotSay), none("the states of VMs are nobody's to share")},
	},
	{
		Name: "hibernated", Ask: run(contract.KeyName, "{gone}", contract.KeyHibernate, "true"),
		Cells: [4]Cell{sleeps(), foreign(), waits(createError, doesNotSay), waits(createError, doesNotSay)},
	},
	{
		Name: "hibernated when it has run", Ask: run(contract.KeyName, "{plain:doze}", contract.KeyHibernate, "true"), Quick: alike,
		Cells: [4]Cell{sleeps(), sleeps(), sleeps(), sleeps()},
	},
	{
		Name: "saved when deleted", Ask: run(contract.KeyName, "{kept}", contract.KeySnapshotPolicy, "always"),
		Cells: [4]Cell{boots(), foreign(), boots(), boots()},
	},
	{
		Name: "offered for forks", Ask: run(contract.KeyName, "{main}", contract.KeyOfferFork, "true"), Quick: alike,
		Cells: [4]Cell{boots(), foreign(), boots(), boots()},
	},
	{
		Name: "evicted to the registry", Ask: run(contract.KeyName, "{going}", contract.KeyEvictionPolicy, "hibernate"), Quick: alike,
		Cells: [4]Cell{boots(), foreign(), boots(), boots()},
	},

	// What only the node reports.
	{
		Name: "id of a VM", Ask: with(clone("none:1"), contract.KeyID, "{id:found}"),
		Cells: [4]Cell{later(waits(createError, noSnapshot), goesOn(Own)), waits(createError, noSnapshot), waits(createError, noSnapshot), later(waits(createError, noSnapshot), goesOn(Public))},
		Takes: []string{"pub-found"}, Quick: "it needs a node that starts anew",
	},
	{
		Name: "machine that is there", Ask: ask(contract.KeyMode, "static", contract.KeyID, "{id:db}", contract.KeyIP, "{ip:db}", contract.KeyProbePort, "22"), Cells: all(stands()),
	},
	{
		Name: "machine of the node", Ask: ask(contract.KeyMode, "static", contract.KeyID, "x", contract.KeyIP, "127.0.0.1", contract.KeyVNCPort, "5900"),
		Cells: [4]Cell{none(operatorsIs), none(operatorsIs), stands(), none("nobody shares it")},
	},
	{
		Name: "machine of a network that is listed", Ask: ask(contract.KeyMode, "static", contract.KeyID, "x", contract.KeyIP, "192.0.2.9"),
		Cells: [4]Cell{none(operatorsIs), none(operatorsIs), none("the machine of the node is one"), stands()},
	},

	// Images that the node already has: each may be used by those who may read it in its registry.
	{
		Name: "image", Image: "{image:app}", Ask: run(), More: credentials(corev1.PullIfNotPresent),
		Cells: [4]Cell{boots(), waits(pullBackOff, "Back-off pulling"), waits(pullBackOff, "Back-off pulling"), boots()},
	},
	{
		Name: "image that is not to be pulled", Image: "{image:app}", Ask: run(), More: credentials(corev1.PullNever), Cells: cached("ErrImageNeverPull"),
	},
	{
		Name: "image to be pulled", Image: "{image:app}", Ask: run(), More: credentials(corev1.PullAlways), Cells: cached(pullBackOff),
	},
	{
		Name: "image by digest", Image: "{imagedigest:app}", Ask: run(), More: credentials(corev1.PullIfNotPresent), Cells: cached(pullBackOff),
	},
	{
		Name: "image by id", Image: "{imageid:app}", Ask: run(), More: credentials(corev1.PullIfNotPresent), Cells: cached(pullBackOff),
	},
	{
		Name: "image by short id", Image: "{imageshort:app}", Ask: run(), More: credentials(corev1.PullNever), Cells: cached("ErrImageNeverPull"),
	},
	{
		Name: "image as an annotation", Ask: run(contract.KeyImage, "{image:app}"), More: credentials(corev1.PullIfNotPresent), Cells: cached(pullBackOff),
	},

	{
		Name: "image with a kernel", Image: "{image:app}", Ask: run(contract.KeyHardware, `{"kernel": {"volume": "kernel", "path": "/no/kernel"}}`), More: kernelOf,
		Cells: [4]Cell{waits(createError, "there is no file /no/kernel"), waits(pullBackOff, "Back-off pulling"), waits(pullBackOff, "Back-off pulling"), waits(createError, "there is no file /no/kernel")},
	},

	{
		Name: "file of the node as a disk", Ask: run(contract.KeyHardware, `{"hostDisks": {"disk": {}}}`), More: diskOfNode,
		Cells: [4]Cell{none(operatorsIs), none(operatorsIs), waits(createError, "is not below a folder that its operator has allowed"), none("nobody shares it")},
	},

	// Networks and sets.
	{
		Name: "network", Ask: run(contract.KeyNetwork, "{network:any}"),
		Cells: [4]Cell{none(operatorsIs), none(operatorsIs), none("all that a node has are for all"), boots()},
	},
	{
		Name: "further network", Ask: run(contract.KeyNetworks, "{network:any}"),
		Cells: [4]Cell{none(operatorsIs), none(operatorsIs), none("all that a node has are for all"), boots()},
	},
	{
		Name: "place in a set", Quick: "a cluster collects pods whose set is not there", Ask: managed(contract.KeyMode, "run", contract.KeyGeneration, "1"),
		On:    map[string]string{contract.LabelSetName: "{ns}-set", contract.LabelSetRole: contract.RoleMain, contract.LabelSetSlot: "0"},
		Forms: []string{"RoleMain", "OwnerKind", "MayNameOf", "SlotOf", "Member.Set", "Member.Main"},
		More: func(p *corev1.Pod, w Whose) {
			p.OwnerReferences = append(p.OwnerReferences, owner(w.prefix()+"-set"))
		},
		Cells: [4]Cell{boots(), boots(), none("sets are a namespace's"), none("sets are a namespace's")},
	},
	{
		Name: "labels of VMs", Ask: run(), Quick: alike,
		On: map[string]string{
			contract.VMLabelNode: "node-1", contract.VMLabelPodNamespace: "{ns}", contract.VMLabelPodName: "db", contract.VMLabelPodUID: "{uid:db}", contract.VMLabelSave: "true",
			contract.VMLabelHibernate: "true", contract.VMLabelCRISandbox: "{uid:db}", contract.VMLabelCRIHandler: "cocoon", contract.VMLabelCRIContainer: "db", contract.VMLabelOwnerUID: "{uid:db}",
		},
		Cells: [4]Cell{boots(), boots(), boots(), boots()},
	},
}, sources()...)

// earlier is the reason why only the quick version runs a row.
const earlier = "it needs what an earlier release left"

// alike is the reason why only the quick version runs a row: real guests are expensive.
const alike = "a row beside it runs as many guests"

// sources returns rows for the annotations of Virtlet that name ConfigMaps and Secrets.
func sources() (rows []Row) {
	missing, objects := waits("CreateContainerConfigError", "not found"), none("objects of the cluster are a namespace's")
	read := waits("CreateContainerConfigError", "is not a line of authorized_keys") // the Secret also has other values
	rows = []Row{{
		Name: "ssh keys of a Secret", Ask: run(contract.KeySSHSecrets, "{ns}-keys"), Image: "cloud",
		Cells: [4]Cell{read, missing, objects, objects}, Quick: "it needs the image of a disk",
	}, {
		Name: "ssh keys of a Secret elsewhere", Ask: run(contract.KeySSHSecrets, "../{ns}/{ns}-keys"), Image: "cloud",
		Cells: [4]Cell{refuses(contract.KeySSHSecrets), refuses(contract.KeySSHSecrets), objects, objects},
	}}
	for _, logins := range []string{`{"passwords": ["../{ns}/{ns}-keys"]}`, `{"keys": {"{ns}/{ns}-keys": ["root"]}}`} {
		rows = append(rows, Row{
			Name: "logins of a Secret elsewhere " + logins, Ask: run(contract.KeyLogins, logins), Image: "cloud", Forms: []string{"Logins.Secrets"},
			Cells: [4]Cell{refuses(contract.KeyLogins), refuses(contract.KeyLogins), objects, objects},
		})
	}
	for _, key := range []string{contract.KeyVirtletUserDataSource, contract.KeyVirtletSSHKeySource, contract.KeyVirtletFiles, contract.KeyNetworkData} {
		for _, kind := range []string{contract.SourceConfigMap, contract.SourceSecret} {
			name := strings.ToLower(strings.NewReplacer("Virtlet", "", "CloudInit", "", contract.PrefixVM, "").Replace(key)) + " of a " + kind
			rows = append(rows, Row{
				Name: name, Ask: run(key, kind+"/{ns}-keys"), Image: "cloud", Forms: []string{"SourceConfigMap", "SourceSecret", "Source.String"},
				Cells: [4]Cell{boots(), missing, objects, objects}, Quick: "it needs the image of a disk",
			}, Row{
				Name: name + " elsewhere", Ask: run(key, kind+"/../{ns}/{ns}-keys"), Image: "cloud",
				Cells: [4]Cell{refuses(key), refuses(key), objects, objects},
			})
		}
	}
	return rows
}

// cached returns the cells of an image that the node has and that the pod may not run.
func cached(reason string) [4]Cell {
	c := waits(reason, "")
	return [4]Cell{none("the row of images runs it"), c, c, none("the row of images runs it")}
}

// PullSecret is the Secret that Dev's pods use to read Dev's own repositories.
const PullSecret = "registry"

func credentials(policy corev1.PullPolicy) func(*corev1.Pod, Whose) {
	return func(p *corev1.Pod, _ Whose) {
		p.Spec.Containers[0].ImagePullPolicy = policy
		p.Spec.ImagePullSecrets = []corev1.LocalObjectReference{{Name: PullSecret}}
	}
}

// kernelOf makes the image of the container that of the kernel which a guest without a disk boots.
func kernelOf(p *corev1.Pod, w Whose) {
	credentials(corev1.PullIfNotPresent)(p, w)
	c := &p.Spec.Containers[0]
	p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "kernel", VolumeSource: corev1.VolumeSource{Image: &corev1.ImageVolumeSource{Reference: c.Image, PullPolicy: c.ImagePullPolicy}}})
	c.Image = "volume://kernel"
}

// diskOfNode lets the guest boot from a file that the operator has listed for nobody.
func diskOfNode(p *corev1.Pod, _ Whose) {
	file := corev1.HostPathFile
	p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "disk", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/etc/passwd", Type: &file}}})
	p.Spec.Containers[0].Image = "volume://disk"
}

// with returns m with one more annotation.
func with(m map[string]string, key, value string) map[string]string {
	m[key] = value
	return m
}

func owner(set string) metav1.OwnerReference {
	return metav1.OwnerReference{APIVersion: "cocoonset.cocoonstack.io/v1", Kind: contract.OwnerKind, Name: set, UID: "of-the-set", Controller: new(true)}
}
