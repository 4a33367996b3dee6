package contract

import (
	"cmp"
	"math"
	"regexp"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

// Annotations of Virtlet, with Virtlet's names. A boolean is true only for the literal "true", and false for anything else.
const (
	KeyVirtletVCPUs             = "VirtletVCPUCount"
	KeyVirtletDiskDriver        = "VirtletDiskDriver"
	KeyVirtletRootVolumeSize    = "VirtletRootVolumeSize"
	KeyVirtletCPUModel          = "VirtletCPUModel"
	KeyVirtletCPUSetting        = "VirtletLibvirtCPUSetting"
	KeyVirtletSystemUUID        = "VirtletSystemUUID"
	KeyVirtletChownMounts       = "VirtletChown9pfsMounts"
	KeyVirtletImageType         = "VirtletCloudInitImageType"
	KeyVirtletMetaData          = "VirtletCloudInitMetaData"
	KeyVirtletUserData          = "VirtletCloudInitUserData"
	KeyVirtletUserDataOverwrite = "VirtletCloudInitUserDataOverwrite"
	KeyVirtletUserDataScript    = "VirtletCloudInitUserDataScript"
	KeyVirtletUserDataSource    = "VirtletCloudInitUserDataSource"
	KeyVirtletUserDataKey       = "VirtletCloudInitUserDataSourceKey"
	KeyVirtletUserDataEncoding  = "VirtletCloudInitUserDataSourceEncoding"
	KeyVirtletSSHKeys           = "VirtletSSHKeys"
	KeyVirtletSSHKeySource      = "VirtletSSHKeySource"
	KeyVirtletFiles             = "VirtletFilesFromDataSource"
	KeyVirtletForceDHCP         = "VirtletForceDHCPNetworkConfig"
)

// MountScript is Virtlet's placeholder in a user-data script for the commands that mount a pod's volumes. Cocoon mounts volumes
// without cloud-init.
const MountScript = "@virtlet-mount-script@"

// The kinds of a Source.
const (
	SourceConfigMap = "configmap"
	SourceSecret    = "secret"
)

// Source is kind/name or kind/name/key: a ConfigMap or Secret in the pod's namespace. The zero value means no source.
type Source struct{ Kind, Name, Key string }

// String is the source in the form that annotations use.
func (s Source) String() string {
	switch {
	case s == Source{}:
		return ""
	case s.Key == "":
		return s.Kind + "/" + s.Name
	}
	return s.Kind + "/" + s.Name + "/" + s.Key
}

// Encodings of values in a Source. For empty, see the key's documentation.
const (
	EncodingPlain  = "plain"
	EncodingBase64 = "base64"
)

// Virtlet is what a pod requests with the annotations of Virtlet. The zero value requests nothing. Documents may be secret, so no
// error of this package contains them.
type Virtlet struct {
	VCPUs          int               // 0: not given
	DiskDriver     string            // scsi, virtio
	RootVolumeSize resource.Quantity // zero: not given
	CPUModel       string            // host-model
	CPUSetting     string            // a YAML document
	SystemUUID     string
	ChownMounts    bool

	ImageType         string // nocloud, configdrive
	MetaData          string // a YAML document
	UserData          string // a YAML document
	UserDataOverwrite bool
	UserDataScript    string
	UserDataSource    Source
	UserDataKey       string // of UserDataSource: its value is the whole user-data
	UserDataEncoding  string // of that value; empty is plain
	SSHKeys           string // lines of authorized_keys
	SSHKeySource      Source // an empty key is authorized_keys
	Files             Source
	ForceDHCP         bool
}

const maxVCPUs = 255

var (
	uuidRE = regexp.MustCompile(`^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$`)
	nameRE = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$`)
	keyRE  = regexp.MustCompile(`^[-._a-zA-Z0-9]{1,253}$`)
)

// ParseVirtlet reads a Virtlet. The error, if any, is an Errors with every bad key. The good keys are read anyway.
func ParseVirtlet(annotations map[string]string) (Virtlet, error) {
	r := &reader{from: annotations}
	v := Virtlet{
		VCPUs:          r.vcpus(),
		DiskDriver:     oneOf(r, KeyVirtletDiskDriver, "scsi", "virtio"),
		RootVolumeSize: r.rootVolumeSize(),
		CPUModel:       oneOf(r, KeyVirtletCPUModel, "host-model"),
		CPUSetting:     annotations[KeyVirtletCPUSetting],
		SystemUUID:     r.uuid(),
		ChownMounts:    annotations[KeyVirtletChownMounts] == "true",

		ImageType:         r.imageType(),
		MetaData:          annotations[KeyVirtletMetaData],
		UserData:          annotations[KeyVirtletUserData],
		UserDataOverwrite: annotations[KeyVirtletUserDataOverwrite] == "true",
		UserDataScript:    annotations[KeyVirtletUserDataScript],
		UserDataSource:    r.source(KeyVirtletUserDataSource, false),
		UserDataKey:       r.dataKey(),
		UserDataEncoding:  oneOf(r, KeyVirtletUserDataEncoding, EncodingPlain, EncodingBase64),
		SSHKeys:           annotations[KeyVirtletSSHKeys],
		SSHKeySource:      r.source(KeyVirtletSSHKeySource, true),
		Files:             r.source(KeyVirtletFiles, false),
		ForceDHCP:         annotations[KeyVirtletForceDHCP] == "true",
	}
	return v, r.errs.err()
}

// vcpus reads a count. Like Virtlet, it treats 0 and less as not given.
func (r *reader) vcpus() int {
	v := r.from[KeyVirtletVCPUs]
	if v == "" {
		return 0
	}
	n, err := strconv.Atoi(v)
	if err != nil || n > maxVCPUs {
		r.bad(KeyVirtletVCPUs, "must be a number of CPUs, at most 255")
		return 0
	}
	return max(n, 0)
}

// rootVolumeSize reads a quantity. Like Virtlet, it treats 0 and less as not given.
func (r *reader) rootVolumeSize() resource.Quantity {
	v := r.from[KeyVirtletRootVolumeSize]
	if v == "" {
		return resource.Quantity{}
	}
	q, err := resource.ParseQuantity(v)
	if err != nil || q.Value() == math.MaxInt64 {
		r.bad(KeyVirtletRootVolumeSize, "must be a quantity such as 10Gi")
		return resource.Quantity{}
	}
	if q.Sign() <= 0 {
		return resource.Quantity{}
	}
	return q
}

func (r *reader) uuid() string {
	v := r.from[KeyVirtletSystemUUID]
	if v != "" && !uuidRE.MatchString(v) {
		r.bad(KeyVirtletSystemUUID, "must be a UUID")
		return ""
	}
	return strings.ToLower(v)
}

func (r *reader) imageType() string {
	switch v := strings.ToLower(r.from[KeyVirtletImageType]); v {
	case "", "nocloud", "configdrive":
		return v
	}
	r.bad(KeyVirtletImageType, "must be one of nocloud, configdrive")
	return ""
}

func (r *reader) source(key string, withKey bool) Source {
	v := r.from[key]
	if v == "" {
		return Source{}
	}
	parts := strings.Split(v, "/")
	s := Source{Kind: parts[0]}
	form := "configmap/NAME or secret/NAME"
	ok := len(parts) == 2
	if withKey {
		form += ", with /KEY after it or not"
		ok = ok || len(parts) == 3 && keyRE.MatchString(parts[2])
	}
	if !ok || s.Kind != SourceConfigMap && s.Kind != SourceSecret || !nameRE.MatchString(parts[1]) {
		r.bad(key, "must be "+form)
		return Source{}
	}
	s.Name = parts[1]
	if len(parts) == 3 {
		s.Key = parts[2]
	}
	return s
}

func (r *reader) dataKey() string {
	v := r.from[KeyVirtletUserDataKey]
	switch {
	case v == "":
	case !keyRE.MatchString(v):
		r.bad(KeyVirtletUserDataKey, "must be a key of a ConfigMap or Secret")
		return ""
	case r.from[KeyVirtletUserDataSource] == "":
		r.bad(KeyVirtletUserDataKey, "needs "+KeyVirtletUserDataSource)
		return ""
	}
	return v
}

// CloudInit reports whether v requests anything that only cloud-init can provide.
func (v Virtlet) CloudInit() bool {
	return cmp.Or(v.ImageType, v.MetaData, v.UserData, v.UserDataScript, v.SSHKeys) != "" || v.ForceDHCP ||
		cmp.Or(v.UserDataSource, v.SSHKeySource, v.Files) != Source{}
}

// Apply writes v to annotations: keys of empty fields are removed.
func (v Virtlet) Apply(annotations map[string]string) {
	vcpus, size := "", ""
	if v.VCPUs > 0 {
		vcpus = strconv.Itoa(v.VCPUs)
	}
	if !v.RootVolumeSize.IsZero() {
		size = v.RootVolumeSize.String()
	}
	put(annotations, KeyVirtletVCPUs, vcpus)
	put(annotations, KeyVirtletDiskDriver, v.DiskDriver)
	put(annotations, KeyVirtletRootVolumeSize, size)
	put(annotations, KeyVirtletCPUModel, v.CPUModel)
	put(annotations, KeyVirtletCPUSetting, v.CPUSetting)
	put(annotations, KeyVirtletSystemUUID, v.SystemUUID)
	put(annotations, KeyVirtletChownMounts, flagText(v.ChownMounts))
	put(annotations, KeyVirtletImageType, v.ImageType)
	put(annotations, KeyVirtletMetaData, v.MetaData)
	put(annotations, KeyVirtletUserData, v.UserData)
	put(annotations, KeyVirtletUserDataOverwrite, flagText(v.UserDataOverwrite))
	put(annotations, KeyVirtletUserDataScript, v.UserDataScript)
	put(annotations, KeyVirtletUserDataSource, v.UserDataSource.String())
	put(annotations, KeyVirtletUserDataKey, v.UserDataKey)
	put(annotations, KeyVirtletUserDataEncoding, v.UserDataEncoding)
	put(annotations, KeyVirtletSSHKeys, v.SSHKeys)
	put(annotations, KeyVirtletSSHKeySource, v.SSHKeySource.String())
	put(annotations, KeyVirtletFiles, v.Files.String())
	put(annotations, KeyVirtletForceDHCP, flagText(v.ForceDHCP))
}
